"""An end-to-end demo on one machine, offline: `python -m examples.demo`, or `make demo`.

Trains a small GPT-2 on the source code of Python's standard library, converts it to three other position schemes,
fine-tunes each, evaluates all of them far past the trained length, and writes an HTML report.
"""
