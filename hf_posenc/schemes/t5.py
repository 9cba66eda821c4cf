"""A learned bias for every head and bucket of distances: exact when near, logarithmic when far."""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import nn
from transformers import initialization as init

from ..options import Options, at_least, option
from ..scheme import DistanceBias, LayerPart, ModelShape, Positions, Scheme


@dataclasses.dataclass(frozen=True, kw_only=True)
class T5Options(Options):
    num_buckets: int = option(32, "rows of the table; half of them for keys ahead where bidirectional", at_least(2))
    max_distance: int = option(128, "distance from which on all keys share the last bucket", at_least(2))
    bidirectional: bool | None = option(None, "tell keys ahead from keys behind; None: in encoders only")
    shared: bool = option(True, "one table for all layers (T5); false: one each (UMT5)")


class BucketTable(LayerPart):
    """A bias for each bucket and head. Starts at zero: it changes nothing until it is trained."""

    def __init__(self, num_buckets: int, num_heads: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_buckets, num_heads))

    def reset_parameters(self) -> None:
        init.zeros_(self.weight)

    def forward(self, buckets: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return nn.functional.embedding(buckets, self.weight.to(dtype)).movedim(-1, 0)


def distance_buckets(distances: torch.Tensor, num_buckets: int, max_distance: int, bidirectional: bool) -> torch.Tensor:
    """Bucket of each distance (key minus query). The logarithm is in float32 and in T5's order: edges depend on it."""
    first = torch.zeros_like(distances)
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


class T5(Scheme):
    """One learned bias for each head and bucket of distances, added to the scaled logits."""

    name = "t5"
    paper = "Raffel et al. 2020, https://arxiv.org/abs/1910.10683"
    extends = True
    Options = T5Options
    options: T5Options

    def __init__(self, options: T5Options, shape: ModelShape) -> None:
        super().__init__(options, shape)
        self.bidirectional = not shape.causal if options.bidirectional is None else options.bidirectional
        one_way = options.num_buckets // 2 if self.bidirectional else options.num_buckets
        if one_way < 2:
            raise ValueError(f"t5: num_buckets must be at least 4 where bidirectional, got {options.num_buckets}")
        if options.max_distance <= one_way // 2:
            raise ValueError(
                f"t5: max_distance must be above {one_way // 2}, where buckets begin to widen "
                f"(num_buckets={options.num_buckets}), got {options.max_distance}"
            )
        self.table = self._new_table() if options.shared else None

    def _new_table(self) -> BucketTable:
        return BucketTable(self.options.num_buckets, self.shape.num_heads)

    def layer_part(self) -> BucketTable | None:
        return None if self.options.shared else self._new_table()

    def prepare(self, positions: Positions) -> tuple[torch.Tensor, torch.dtype]:
        options = self.options
        buckets = distance_buckets(positions.distances, options.num_buckets, options.max_distance, self.bidirectional)
        return buckets, positions.dtype

    def score(self, prepared: tuple[torch.Tensor, torch.dtype], part: nn.Module | None) -> DistanceBias:
        table = self.table if self.options.shared else part
        assert table is not None
        return DistanceBias(table(*prepared))
