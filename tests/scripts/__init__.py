"""Tests of the scripts that are run by make."""
