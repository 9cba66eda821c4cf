"""A line that says what a command is doing, once it has taken a while."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import typer

PATIENCE = 2.0
"""Seconds that a command may take without a word."""


@contextmanager
def announce_wait(label: str) -> Iterator[None]:
    """If the block takes longer than `PATIENCE`, print what it is doing, on stderr.

    It is one line and not a moving bar, so that it does no harm in log files or above the progress bars of the block.

    Args:
        label: What the block does, such as "Pushing gpt2-rope to me/gpt2-rope".
    """
    timer = threading.Timer(PATIENCE, lambda: typer.echo(f"{label} ...", err=True))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
