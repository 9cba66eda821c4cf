"""A trained vector for each distance, up to a limit, that joins the keys and the values."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import torch
from torch import nn
from transformers import initialization as init

from .base import Kind, LayerParameters, LayerParams, Scheme
from .inputs import Content, Positions
from .options import Options, at_least, option
from .terms import DistanceTable, KeyTerm, QueryTerm, Term


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShawOptions(Options):
    max_distance: int = option(16, "distance from which on all keys share a vector, on either side", at_least(1))
    values: bool = option(True, "whether vectors join the values as well as the keys")
    query_term: bool = option(False, "add key . vector too (BERT's relative_key_query of transformers 4)")
    init: Literal["neutral", "paper"] = option("neutral", "vectors of zero, or at random (Glorot uniform)")


class DistanceTables(LayerParameters):
    """The vectors of one layer, shared by its heads. Row `max_distance + i - j` is for query i and key j."""

    def __init__(self, head_size: int, options: ShawOptions) -> None:
        super().__init__()
        self.options = options
        self.keys = nn.Parameter(torch.empty(2 * options.max_distance + 1, head_size))
        if options.values:
            self.values = nn.Parameter(torch.empty(2 * options.max_distance + 1, head_size))

    def reset_parameters(self) -> None:
        for table in self.parameters(recurse=False):
            if self.options.init == "paper":
                init.xavier_uniform_(table)
            else:
                init.zeros_(table)


class Shaw(Scheme):
    """A trained vector for each distance joins every key, and another one every value, at that distance."""

    name = "shaw"
    paper = "Shaw et al. 2018, https://arxiv.org/abs/1803.02155"
    kind = Kind.CONTENT
    formula = "q_i.(k_j + a_clip(r)) / sqrt(d); output sum_j w_ij (v_j + b_clip(r))"
    cost = "tables of 2 max_distance + 1 rows a layer; queries x rows, weights x rows with `values`"
    neutral = "`keys` and `values` are 0"
    extends = True
    Options = ShawOptions
    options: ShawOptions

    @classmethod
    def acts(cls, seam: str, options: Any) -> bool:
        return super().acts(seam, options) and (seam != "value" or options.values)

    def layer_module(self) -> DistanceTables:
        return DistanceTables(self.shape.head_size, self.options)

    def prepare(self, positions: Positions) -> torch.Tensor:
        limit = self.options.max_distance
        return limit - positions.distances.clamp(-limit, limit)

    def score(self, prepared: torch.Tensor, part: LayerParams | None, content: Content) -> list[Term]:
        assert part is not None
        rows = DistanceTable(part()["keys"][None] * content.scaling, prepared)
        terms: list[Term] = [QueryTerm(rows)]
        if self.options.query_term:
            terms.append(KeyTerm(rows))
        return terms

    def value(self, prepared: torch.Tensor, part: LayerParams | None) -> DistanceTable:
        assert part is not None
        return DistanceTable(part()["values"][None], prepared)
