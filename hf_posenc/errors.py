"""The errors that users see when a request cannot be honoured."""

from __future__ import annotations


class PosEncError(ValueError):
    """Something the caller asked for cannot be done: an unknown scheme, an unsupported model, a damaged checkpoint.

    The message names the value at fault, what is accepted instead, and the way out. Bugs in the package raise other
    exceptions, so catching `PosEncError` never hides one.
    """


class SequenceLengthError(PosEncError):
    """The input is longer than a model or its position scheme can process; a shorter one would be accepted."""
