"""T5 relative bias (Raffel et al. 2020): a learned bias per head and bucket of distances."""

from typing import Literal, NamedTuple

import torch

from . import Content, DistanceBias, Kind, LayerParameters, LayerParams, ModelShape, Options, Positions, Scheme, option
from .functional import bucket_bias, check_buckets, distance_buckets, paper_or_neutral


class T5Options(Options):
    num_buckets: int = option(32, "rows of the bias table; half of them for later keys if bidirectional", minimum=2)
    max_distance: int = option(128, "distances beyond this share the last bucket", minimum=2)
    bidirectional: bool | None = option(None, "separate earlier and later keys; None: in encoders only")
    shared: bool = option(True, "one table for all layers (T5); false: one per layer (UMT5)")
    init: Literal["neutral", "paper"] = option("neutral", "a zero table, or random as in T5")


class Prepared(NamedTuple):
    """The bucket of each distance, and the bias itself if all layers share it and no gradient is needed."""

    buckets: torch.Tensor
    dtype: torch.dtype
    bias: torch.Tensor | None


class T5(Scheme[T5Options, Prepared]):
    """A learned bias per head and bucket of distances. Buckets are exact when near and logarithmic when far."""

    name = "t5"
    paper = "Raffel et al. 2020, https://arxiv.org/abs/1910.10683"
    kind = Kind.DISTANCE
    formula = "q.k / sqrt(d) + b_h[bucket(r)]"
    cost = "one scalar per head and bucket; one bias vector per head"
    neutral = "`table.weight` is 0"
    tested_against = "T5, UMT5 and MPNet of Transformers, and T5's buckets at every distance"
    recommended = {"shared": False}
    Options = T5Options

    def __init__(self, options: T5Options, shape: ModelShape) -> None:
        super().__init__(options, shape)
        self.bidirectional = not shape.causal if options.bidirectional is None else options.bidirectional
        check_buckets("t5", options.num_buckets, options.max_distance, self.bidirectional)
        self.table = self._new_table() if options.shared else None

    def _new_table(self) -> LayerParameters:
        shape = (self.options.num_buckets, self.shape.num_heads)
        return LayerParameters(weight=(shape, paper_or_neutral(self.options.init, self.shape.hidden_size**-0.5)))

    def layer_module(self) -> LayerParameters | None:
        return None if self.options.shared else self._new_table()

    def prepare(self, positions: Positions) -> Prepared:
        options, bias = self.options, None
        buckets = distance_buckets(positions.distances, options.num_buckets, options.max_distance, self.bidirectional)
        if self.table is not None and not torch.is_grad_enabled():
            bias = bucket_bias(self.table()["weight"], buckets, positions.dtype)
        return Prepared(buckets, positions.dtype, bias)

    def score(self, prepared: Prepared, layer_params: LayerParams, content: Content) -> DistanceBias:
        if prepared.bias is not None:
            return DistanceBias(prepared.bias)
        table = layer_params if self.table is None else self.table
        return DistanceBias(bucket_bias(table()["weight"], prepared.buckets, prepared.dtype))
