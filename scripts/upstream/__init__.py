"""Run transformers' own model tests on models with a position scheme, and compare them with stock, test by test.

The tests come from a checkout of https://github.com/huggingface/transformers; nothing of it is stored here.
"""
