"""Untied positions: queries and keys of the positions themselves, beside those of the content."""

from __future__ import annotations

import dataclasses
from typing import Literal, NamedTuple

import torch
from torch import nn
from transformers import initialization as init

from .base import Kind, LayerParameters, LayerParams, ModelShape, Scheme
from .functional import BASE, check_buckets, distance_buckets, sinusoids, tiled_identity
from .inputs import Content, Positions, check_table_length
from .options import Options, at_least, option
from .t5 import BucketTable
from .terms import DistanceBias, Separable, Term

NORM_EPSILON, SPREAD = 1e-5, 0.02
"""Of the norm on positions and of the paper's initialisation."""
TRAIN_LONGER = 'train a longer table: "max_positions": {length}'


@dataclasses.dataclass(frozen=True, kw_only=True)
class TupeOptions(Options):
    relative: bool = option(True, "add a bias by bucket of distance as T5 does (TUPE-R); false: without it (TUPE-A)")
    untie_cls: bool = option(False, "give the first token a row and a column of its own, for encoders with a [CLS]")
    max_positions: int | None = option(None, "positions the table serves; None: the model's own", at_least(1))
    num_buckets: int = option(32, "of the relative bias, as in t5", at_least(2))
    max_distance: int = option(128, "of the relative bias, as in t5", at_least(2))
    init: Literal["neutral", "paper"] = option(
        "neutral", "content as it was and positions silent, or the paper's scale and parameters at random"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.relative and (self.num_buckets, self.max_distance) != (32, 128):
            raise ValueError('num_buckets and max_distance are of the relative bias: add "relative": true')


class ContentScale(LayerParameters):
    """How much a layer's content counts: 1 + `content_change`. Neutral: as before; the paper: as much as positions do.

    Zero is neutral, so that weight decay pulls that way and not towards a layer without content.
    """

    def __init__(self, num_heads: int, start: str) -> None:
        super().__init__()
        self.start = start
        self.content_change = nn.Parameter(torch.empty(num_heads))

    def reset_parameters(self) -> None:
        init.constant_(self.content_change, 2**-0.5 - 1 if self.start == "paper" else 0.0)


class Prepared(NamedTuple):
    """Positions of queries and keys, and the buckets of their distances where the bias is relative."""

    queries_BQ: torch.Tensor
    keys_BK: torch.Tensor
    buckets: torch.Tensor | None
    dtype: torch.dtype
    sides: tuple[torch.Tensor, torch.Tensor] | None = None
    """Queries and keys of the positions, where there is no gradient: with one, checkpointing needs them in a layer."""


class Tupe(Scheme):
    """Positions have queries and keys of their own, the same in all layers, and meet apart from the content.

    [q . k + (p_i U_Q) . (p_j U_K)] / sqrt(2 d), with a norm of its own on p; under init = "neutral" content keeps its
    old scale. Neutral: `query_projection`, the bias of buckets and the numbers of [CLS] are zero.
    """

    name = "tupe"
    paper = "Ke et al. 2021, https://arxiv.org/abs/2006.15595"
    kind = Kind.CONTENT
    formula = "[q_i.k_j + (p_i U_Q).(p_j U_K)] / sqrt(2 d) + b_h[bucket(r)]"
    cost = "a table and two projections for all layers, a number a head and layer; a product of positions a layer"
    neutral = "`query_projection`, `bias.weight`, `cls_row`, `cls_column` and `content_change` (not in the paper) are 0"
    extends = False
    needs_key_positions = True
    Options = TupeOptions
    options: TupeOptions

    def __init__(self, options: TupeOptions, shape: ModelShape) -> None:
        super().__init__(options, shape)
        width, self.max_positions = shape.hidden_size, options.max_positions or shape.max_positions
        self.table = nn.Parameter(torch.empty(self.max_positions, width))
        self.norm = nn.LayerNorm(width, eps=NORM_EPSILON)
        self.query_projection, self.key_projection = (
            nn.Parameter(torch.empty(shape.num_heads * shape.head_size, width)) for _ in range(2)
        )
        self.bias = None
        if options.relative:
            check_buckets("tupe", options.num_buckets, options.max_distance, not shape.causal)
            spread = SPREAD if options.init == "paper" else 0.0
            self.bias = BucketTable(options.num_buckets, shape.num_heads, spread)
        if options.untie_cls:
            self.cls_row, self.cls_column = (nn.Parameter(torch.empty(shape.num_heads)) for _ in range(2))

    def layer_module(self) -> ContentScale:
        return ContentScale(self.shape.num_heads, self.options.init)

    def reset_parameters(self) -> None:
        if self.options.init == "paper":
            for parameter in (self.table, self.query_projection, self.key_projection):
                init.normal_(parameter, std=SPREAD)
        else:  # positions and keys that tell places apart, so that there is something for the queries to learn from
            places = torch.arange(self.max_positions)
            init.copy_(self.table, sinusoids(places, self.shape.hidden_size, BASE, "halves", torch.float32))
            init.copy_(self.key_projection, tiled_identity(*self.key_projection.shape))
            init.zeros_(self.query_projection)
        if self.options.untie_cls:
            init.zeros_(self.cls_row)
            init.zeros_(self.cls_column)

    def prepare(self, positions: Positions) -> Prepared:
        check_table_length("tupe", positions, self.max_positions, TRAIN_LONGER)
        assert positions.keys_BK is not None
        options, buckets = self.options, None
        if options.relative:
            distances = positions.distances_BQK() if options.untie_cls else positions.distances
            buckets = distance_buckets(distances, options.num_buckets, options.max_distance, not self.shape.causal)
        # Padding and slots of a cache that are still empty stand nowhere: any row does for what nobody sees.
        keys_BK = positions.keys_BK.clamp(0, self.max_positions - 1)
        prepared = Prepared(positions.queries_BQ, keys_BK, buckets, positions.dtype)
        return prepared if torch.is_grad_enabled() else prepared._replace(sides=self._sides(prepared))

    def content_scale(self, part: LayerParams | None) -> torch.Tensor:
        assert part is not None
        return 1 + part()["content_change"]

    def score(self, prepared: Prepared, part: LayerParams | None, content: Content) -> Term | list[Term]:
        queries, keys = self._sides(prepared)
        if self.options.untie_cls:
            return self._untied(queries.matmul(keys.transpose(-1, -2)), prepared)
        terms: list[Term] = [Separable(queries, keys)]
        if self.bias is not None:
            terms.append(DistanceBias(self.bias(prepared.buckets, prepared.dtype)))
        return terms

    def _untied(self, whole_BHQK: torch.Tensor, prepared: Prepared) -> torch.Tensor:
        """The term with numbers of their own where the query, or else the key, is the first token."""
        if self.bias is not None:
            whole_BHQK = whole_BHQK + self.bias(prepared.buckets, prepared.dtype).transpose(0, 1)
        row, column = (number.to(prepared.dtype).view(1, -1, 1, 1) for number in (self.cls_row, self.cls_column))
        whole_BHQK = torch.where((prepared.keys_BK == 0)[:, None, None, :], column, whole_BHQK)
        return torch.where((prepared.queries_BQ == 0)[:, None, :, None], row, whole_BHQK)

    def _sides(self, prepared: Prepared) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries and keys of the positions, (B or 1, H, Q or K, D), scaled."""
        if prepared.sides is not None:
            return prepared.sides
        dtype, heads = prepared.dtype, (self.shape.num_heads, self.shape.head_size)

        def side(places: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            few = places.numel() < self.max_positions  # then only their rows are projected, else the table
            rows = nn.functional.embedding(places, self.table) if few else self.table
            rows = nn.functional.linear(self.norm(rows).to(dtype), weight.to(dtype))
            rows = rows if few else nn.functional.embedding(places, rows)
            return rows.unflatten(-1, heads).transpose(1, 2)

        scale = (2 * self.shape.head_size) ** -0.5
        queries = side(prepared.queries_BQ, self.query_projection) * scale
        return queries, side(prepared.keys_BK, self.key_projection)
