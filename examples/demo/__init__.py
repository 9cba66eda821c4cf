"""The whole journey on one machine, offline: `python -m examples.demo`, or `make demo`.

A small GPT-2 is trained on what every Python has lying around, gets three other position encodings, is brought back to
quality, measured far past the length that it was made for, and shown in a page.
"""
