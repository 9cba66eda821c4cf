"""Relative position representations (Shaw et al. 2018): a learned vector per distance on keys and values."""

from typing import Literal

import torch
from transformers import initialization as init

from . import Content, Kind, LayerParameters, LayerParams, Options, Positions, Scheme, option
from .terms import DistanceTable, KeyTerm, QueryTerm, Term


class ShawOptions(Options):
    max_distance: int = option(16, "distances beyond this share a vector, on either side", minimum=1)
    values: bool = option(True, "add vectors to the values as well as to the keys")
    query_term: bool = option(False, "add key . vector too (BERT's relative_key_query in transformers 4)")
    init: Literal["neutral", "paper"] = option("neutral", "zero vectors, or random (Glorot uniform)")


class Shaw(Scheme[ShawOptions, torch.Tensor]):
    """A learned vector per distance is added to every key, and another one to every value, at that distance."""

    name = "shaw"
    paper = "Shaw et al. 2018, https://arxiv.org/abs/1803.02155"
    kind = Kind.CONTENT
    formula = "q_i.(k_j + a_clip(r)) / sqrt(d); output sum_j w_ij (v_j + b_clip(r))"
    cost = "tables of 2 max_distance + 1 rows per layer; queries x rows, weights x rows with `values`"
    neutral = "`keys` and `values` are 0"
    tested_against = (
        "Wav2Vec2-BERT's attention and BERT with `relative_key` (Transformers 4); a loop over the formula for values"
    )
    Options = ShawOptions

    @classmethod
    def acts(cls, seam: str, options: ShawOptions) -> bool:
        return super().acts(seam, options) and (seam != "value" or options.values)

    def layer_module(self) -> LayerParameters:
        """Tables shared by the heads of a layer. Row `max_distance + i - j` is for query i and key j."""
        shape = (2 * self.options.max_distance + 1, self.shape.head_size)
        table = (shape, init.xavier_uniform_ if self.options.init == "paper" else init.zeros_)
        names = ("keys", "values") if self.options.values else ("keys",)
        return LayerParameters(**dict.fromkeys(names, table))

    def prepare(self, positions: Positions) -> torch.Tensor:
        limit = self.options.max_distance
        return limit - positions.distances.clamp(-limit, limit)

    def score(self, prepared: torch.Tensor, layer_params: LayerParams, content: Content) -> list[Term]:
        table = DistanceTable(layer_params()["keys"][None] * content.scaling, prepared)
        return [QueryTerm(table), KeyTerm(table)] if self.options.query_term else [QueryTerm(table)]

    def value(self, prepared: torch.Tensor, layer_params: LayerParams) -> DistanceTable:
        return DistanceTable(layer_params()["values"][None], prepared)
