"""A learned bias for every head and bucket of distances: exact when near, logarithmic when far."""

from __future__ import annotations

import dataclasses
from typing import Literal, NamedTuple

import torch
from torch import nn
from transformers import initialization as init

from .base import Kind, LayerModule, LayerParams, ModelShape, Scheme
from .functional import check_buckets, distance_buckets
from .inputs import Content, Positions
from .options import Options, at_least, option
from .terms import DistanceBias


@dataclasses.dataclass(frozen=True, kw_only=True)
class T5Options(Options):
    num_buckets: int = option(32, "rows of the table; half of them for keys ahead where bidirectional", at_least(2))
    max_distance: int = option(128, "distance from which on all keys share the last bucket", at_least(2))
    bidirectional: bool | None = option(None, "tell keys ahead from keys behind; None: in encoders only")
    shared: bool = option(True, "one table for all layers (T5); false: one each (UMT5)")
    init: Literal["neutral", "paper"] = option("neutral", "a table of zeros, or at random with T5's spread")


class BucketTable(LayerModule):
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


class Prepared(NamedTuple):
    """The bucket of each distance; and the bias itself where all layers share it and it needs no gradient."""

    buckets: torch.Tensor
    dtype: torch.dtype
    values: torch.Tensor | None


class T5(Scheme):
    """One learned bias for each head and bucket of distances, added to the scaled logits."""

    name = "t5"
    paper = "Raffel et al. 2020, https://arxiv.org/abs/1910.10683"
    kind = Kind.DISTANCE
    formula = "q.k / sqrt(d) + b_h[bucket(r)]"
    cost = "a number for each head and bucket; one vector a head"
    neutral = "`table.weight` is 0"
    extends = True
    Options = T5Options
    options: T5Options

    def __init__(self, options: T5Options, shape: ModelShape) -> None:
        super().__init__(options, shape)
        self.bidirectional = not shape.causal if options.bidirectional is None else options.bidirectional
        check_buckets("t5", options.num_buckets, options.max_distance, self.bidirectional)
        self.table = self._new_table() if options.shared else None

    def _new_table(self) -> BucketTable:
        spread = self.shape.hidden_size**-0.5 if self.options.init == "paper" else 0.0
        return BucketTable(self.options.num_buckets, self.shape.num_heads, spread)

    def layer_module(self) -> BucketTable | None:
        return None if self.options.shared else self._new_table()

    def prepare(self, positions: Positions) -> Prepared:
        options = self.options
        buckets = distance_buckets(positions.distances, options.num_buckets, options.max_distance, self.bidirectional)
        values = None
        if self.table is not None and not torch.is_grad_enabled():
            values = self.table(buckets, positions.dtype)
        return Prepared(buckets, positions.dtype, values)

    def score(self, prepared: Prepared, part: LayerParams | None, content: Content) -> DistanceBias:
        if prepared.values is not None:
            return DistanceBias(prepared.values)
        table = self.table if self.options.shared else part
        assert table is not None
        return DistanceBias(table(prepared.buckets, prepared.dtype))
