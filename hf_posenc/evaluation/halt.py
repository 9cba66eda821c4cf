"""A model that cannot go on: why, and how far it came. Kept as a result, not as a crash."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


class Halt(Exception):
    """Measuring stopped at some length.

    `lasting`: it would again, so that it need not be tried a second time. `refused`: it is the model that ends before
    this length.
    """

    def __init__(self, reason: str, lasting: bool = True, refused: bool = False) -> None:
        super().__init__(reason, lasting, refused)  # all of it, so that it can be sent to other processes
        self.reason = reason
        self.lasting = lasting
        self.refused = refused


@contextlib.contextmanager
def halting() -> Iterator[None]:
    """Inside, a model's refusal and a device without memory become a Halt."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise Halt(_no_memory(error), lasting=False) from error
    except RuntimeError as error:
        if "allocate memory" not in str(error):
            raise
        raise Halt(_no_memory(error), lasting=False) from error
    except ValueError as error:
        raise Halt(str(error), refused=True) from error


def _no_memory(error: Exception) -> str:
    told = str(error).split(". ")[0]
    return f"out of memory ({told}): take fewer tokens at a time (--batch-tokens), bf16, or more devices"
