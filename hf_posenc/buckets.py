"""A bias for each head and bucket of distances: exact when near, logarithmic when far. T5's, and TUPE's with it."""

from __future__ import annotations

import math

import torch
from torch import nn
from transformers import initialization as init

from .scheme import LayerPart


class BucketTable(LayerPart):
    """A bias for each bucket and head. Starts at zero, which changes nothing, or at random with the given spread."""

    def __init__(self, num_buckets: int, num_heads: int, spread: float = 0.0) -> None:
        super().__init__()
        self.spread = spread
        self.weight = nn.Parameter(torch.empty(num_buckets, num_heads))

    def reset_parameters(self) -> None:
        if self.spread:
            init.normal_(self.weight, std=self.spread)
        else:
            init.zeros_(self.weight)

    def forward(self, buckets: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return nn.functional.embedding(buckets, self.weight.to(dtype)).movedim(-1, 0)


def distance_buckets(distances: torch.Tensor, num_buckets: int, max_distance: int, bidirectional: bool) -> torch.Tensor:
    """Bucket of each distance (key minus query). The logarithm is in float32 and in T5's order: edges depend on it."""
    first: torch.Tensor | int = 0
    if bidirectional:
        num_buckets //= 2
        first = (distances > 0).long() * num_buckets
        distances = distances.abs()
    else:
        distances = -distances.clamp(max=0)
    exact = num_buckets // 2
    widening = torch.log(distances.clamp(min=1).float() / exact) / math.log(max_distance / exact)
    far = exact + (widening * (num_buckets - exact)).long()
    return first + torch.where(distances < exact, distances, far.clamp(max=num_buckets - 1))


def refuse_buckets(name: str, num_buckets: int, max_distance: int, bidirectional: bool) -> None:
    """Raise ValueError for numbers under which there is no bucket to widen."""
    one_way = num_buckets // 2 if bidirectional else num_buckets
    if one_way < 2:
        raise ValueError(f"{name}: num_buckets must be at least 4 where bidirectional, got {num_buckets}")
    if max_distance <= one_way // 2:
        raise ValueError(
            f"{name}: max_distance must be above {one_way // 2}, where buckets begin to widen "
            f"(num_buckets={num_buckets}), got {max_distance}"
        )
