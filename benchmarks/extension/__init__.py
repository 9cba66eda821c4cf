"""Longer inputs without training: methods that extend a rotary model, measured on two models."""
