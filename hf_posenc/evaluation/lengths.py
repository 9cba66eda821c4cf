"""Lengths to measure at, in tokens or in trained lengths: 512, or 2x."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

DEFAULT = ("0.5x", "1x", "2x", "4x")
SHORTEST = 2


def in_tokens(lengths: Sequence[int | str], trained: int | None) -> tuple[int, ...]:
    """The lengths in tokens, each once, shortest first. Only lengths that are in trained lengths need to know that."""
    found = sorted({_one(length, trained) for length in lengths})
    if not found:
        raise ValueError("name at least one length, in tokens (512) or in trained lengths (2x)")
    if found[0] < SHORTEST:
        raise ValueError(f"a length of {found[0]} leaves nothing to predict: ask for {SHORTEST} tokens or more")
    return tuple(found)


def relative(length: int | str) -> bool:
    """Whether it is said in trained lengths."""
    return str(length).strip().lower().endswith("x")


def _one(length: int | str, trained: int | None) -> int:
    text = str(length).strip().lower()
    try:
        return round(float(text[:-1]) * trained) if relative(text) and trained is not None else int(text)
    except (ValueError, OverflowError):
        raise ValueError(f"{length!r} is no length: say it in tokens (512) or in trained lengths (0.5x, 16x)") from None


def trained_length(configs: dict[str, Any], given: int | None, needed: bool = True) -> int | None:
    """What `1x` is: as given, or the length of the position table that all models were made with.

    Where models do not agree, None if it is not needed.
    """
    if given is not None:
        if given < 1:
            raise ValueError(f"the trained length must be 1 or more, not {given}")
        return given
    found = {name: getattr(config, "max_position_embeddings", None) for name, config in configs.items()}
    known = {length for length in found.values() if length is not None}
    if len(known) != 1 or None in found.values():
        if not needed:
            return None
        told = ", ".join(f"{name}: {length}" for name, length in found.items())
        raise ValueError(
            f"the models do not agree on one trained length ({told}): say with --trained-length (trained_length=) "
            "which one 1x shall be"
        )
    return known.pop()
