"""The same weights in another convention: rotary features in another order, a position table of another length."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import torch

RotaryChange = Literal["interleaved_to_halves", "halves_to_interleaved"]


def feature_order(change: RotaryChange, head_size: int, turned: int | None = None) -> list[int]:
    """For each feature of a head its place before the change. Of a partial rotation, the first `turned` change."""
    turned = head_size if turned is None else turned
    if turned % 2 or not 0 < turned <= head_size:
        raise ValueError(f"rotary features come in pairs: {turned} of a head of {head_size} cannot be put in order")
    halves = [*range(0, turned, 2), *range(1, turned, 2)]
    if change == "halves_to_interleaved":
        halves = [halves.index(place) for place in range(turned)]
    elif change != "interleaved_to_halves":
        raise ValueError(f"unknown change {change!r}; it is 'interleaved_to_halves' or 'halves_to_interleaved'")
    return [*halves, *range(turned, head_size)]


def reorder_rotary(
    weight: torch.Tensor, change: RotaryChange, head_size: int, turned: int | None = None
) -> torch.Tensor:
    """The weight or bias of a query or key projection, for features that turn together in the other convention.

    Interleaved is what Meta's own LLaMA files and GPT-J have: neighbours turn together. Halves is what transformers
    has: features half a head apart. Attention computes the same, if its rotation changes along with both projections.
    """
    heads = weight.unflatten(0, (-1, head_size))
    return heads[:, feature_order(change, head_size, turned)].flatten(0, 1).contiguous()


def extend_table(weight: torch.Tensor, rows: int, how: Literal["interpolate", "tile", "hierarchical"]) -> torch.Tensor:
    """A position table with more rows, made of the one there is: to be saved in a stock checkpoint, for example.

    The scheme `{"type": "learned", "max_positions": ..., "extend": ...}` computes the same rows and stores none.
    """
    import torch

    from ..schemes import extended_rows

    if how not in ("interpolate", "tile", "hierarchical"):
        raise ValueError(f"how is one of 'interpolate', 'tile', 'hierarchical', got {how!r}")
    if rows < len(weight) or (how == "hierarchical" and rows > len(weight) ** 2):
        raise ValueError(f"a table of {len(weight)} rows cannot be extended to {rows} ({how})")
    return extended_rows(weight, torch.arange(rows, device=weight.device), how, rows)
