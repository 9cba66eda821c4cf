"""The order of rotary features: which features of a head form the pairs that are rotated together."""

from __future__ import annotations

from typing import Literal

import torch

from ..errors import PosEncError

RotaryChange = Literal["interleaved_to_halves", "halves_to_interleaved"]
"""Meta's LLaMA files and GPT-J rotate neighbouring features together, transformers mostly those half a head apart."""


def rotary_feature_order(change: RotaryChange, head_size: int, rotary_size: int) -> list[int]:
    """For each feature of a head, its index before the change. A partial rotation moves the first `rotary_size`."""
    if rotary_size % 2 or not 0 < rotary_size <= head_size:
        raise PosEncError(f"Rotary features come in pairs: cannot reorder {rotary_size} of {head_size} features")
    pairs = (-1, 2) if change == "interleaved_to_halves" else (2, -1)
    order = torch.arange(rotary_size).view(pairs).T.flatten()
    return [*order.tolist(), *range(rotary_size, head_size)]


def reorder_rows(tensor: torch.Tensor, order: list[int]) -> torch.Tensor:
    """Reorder the rows of every head, for a weight or bias whose rows are the features of all heads."""
    return tensor.unflatten(0, (-1, len(order)))[:, order].flatten(0, 1).contiguous()
