"""TUPE (Ke et al. 2021): absolute positions with their own query and key projections, untied from the content."""

import functools
from typing import Literal, NamedTuple

import torch
from torch import nn
from transformers import initialization as init

from ..errors import PosEncError
from . import Content, Kind, LayerParameters, LayerParams, ModelShape, Options, Positions, Scheme, option
from .functional import (
    bucket_bias,
    check_buckets,
    distance_buckets,
    init_sinusoids,
    init_tiled_identity,
    paper_or_neutral,
)
from .inputs import check_table_length, is_tracing
from .terms import DistanceBias, Separable, Term

NORM_EPSILON, INIT_STD = 1e-5, 0.02
TRAIN_LONGER = 'train a longer table: "max_positions": {length}'


class TupeOptions(Options):
    relative: bool = option(True, "add a T5 bias by bucket of distance (TUPE-R); false: leave it out (TUPE-A)")
    untie_cls: bool = option(False, "give the first token its own row and column bias, for encoders with a [CLS]")
    max_positions: int | None = option(None, "length of the table; None: the model's length", minimum=1)
    num_buckets: int = option(32, "buckets of the relative bias, as in t5", minimum=2)
    max_distance: int = option(128, "largest distance of the relative bias, as in t5", minimum=2)
    init: Literal["neutral", "paper"] = option("neutral", "no positions, or the paper's scale and random parameters")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.relative and (self.num_buckets, self.max_distance) != (32, 128):
            raise PosEncError('num_buckets and max_distance belong to the relative bias: add "relative": true')


class Prepared(NamedTuple):
    """Positions of queries and keys, the buckets of their distances, and the projections if no gradient is needed."""

    queries_BQ: torch.Tensor
    keys_BK: torch.Tensor
    buckets: torch.Tensor | None
    dtype: torch.dtype
    projected: tuple[torch.Tensor, torch.Tensor] | None = None


class Tupe(Scheme[TupeOptions, Prepared]):
    """Positions have their own queries and keys, the same in all layers, whose product is added to the content's.

    With init="neutral" the content keeps its scale 1 / sqrt(d) instead of the paper's 1 / sqrt(2 d).
    """

    name = "tupe"
    paper = "Ke et al. 2021, https://arxiv.org/abs/2006.15595"
    kind = Kind.CONTENT
    formula = "[q_i.k_j + (p_i U_Q).(p_j U_K)] / sqrt(2 d) + b_h[bucket(r)], p normalized"
    cost = "one table and two projections, one scalar per head and layer; a product of positions per layer"
    neutral = "`query_projection`, `bias.weight`, `cls_row`, `cls_column` and `content_change` (not in the paper) are 0"
    tested_against = "a loop over the formula, pair by pair"
    extends = False
    needs_key_positions = True
    Options = TupeOptions
    table: torch.Tensor
    query_projection: torch.Tensor
    key_projection: torch.Tensor
    cls_row: torch.Tensor
    cls_column: torch.Tensor

    def __init__(self, options: TupeOptions, shape: ModelShape) -> None:
        super().__init__(options, shape)
        width, self.max_positions = shape.hidden_size, options.max_positions or shape.max_positions
        projection = (shape.num_heads * shape.head_size, width)
        start = functools.partial(paper_or_neutral, options.init, INIT_STD)
        # Neutral, positions and keys differ, so that the queries have something to learn from.
        self.add_parameters(
            table=((self.max_positions, width), start(init_sinusoids)),
            query_projection=(projection, start()),
            key_projection=(projection, start(init_tiled_identity)),
        )
        self.norm = nn.LayerNorm(width, eps=NORM_EPSILON)
        self.bias: LayerParameters | None = None
        if options.relative:
            check_buckets("tupe", options.num_buckets, options.max_distance, not shape.causal)
            self.bias = LayerParameters(weight=((options.num_buckets, shape.num_heads), start()))
        if options.untie_cls:
            self.add_parameters(cls_row=((shape.num_heads,), init.zeros_), cls_column=((shape.num_heads,), init.zeros_))

    def layer_module(self) -> LayerParameters:
        """Content is scaled by 1 + `content_change`, so that weight decay pulls to neutral."""
        content_change = 2**-0.5 - 1 if self.options.init == "paper" else 0.0
        initializer = functools.partial(init.constant_, val=content_change)
        return LayerParameters(content_change=((self.shape.num_heads,), initializer))

    def prepare(self, positions: Positions) -> Prepared:
        check_table_length("tupe", positions, self.max_positions, TRAIN_LONGER)
        assert positions.keys_BK is not None
        options, buckets = self.options, None
        if options.relative:
            distances = positions.distances_BQK() if options.untie_cls else positions.distances
            buckets = distance_buckets(distances, options.num_buckets, options.max_distance, not self.shape.causal)
        # Padding and empty cache slots have no position; they are masked, so any row will do.
        keys_BK = positions.keys_BK.clamp(0, self.max_positions - 1)
        prepared = Prepared(positions.queries_BQ, keys_BK, buckets, positions.dtype)
        return prepared if torch.is_grad_enabled() else prepared._replace(projected=self._project(prepared))

    def content_scale(self, prepared: Prepared, layer_params: LayerParams) -> torch.Tensor:
        return 1 + layer_params()["content_change"][None, :, None]

    def score(self, prepared: Prepared, layer_params: LayerParams, content: Content) -> Term | list[Term]:
        queries, keys = (content.select_heads(rows, 1) for rows in prepared.projected or self._project(prepared))
        bias = None
        if self.bias is not None and prepared.buckets is not None:
            bias = bucket_bias(content.select_heads(self.bias()["weight"], 1), prepared.buckets, prepared.dtype)
        if not self.options.untie_cls:
            return Separable(queries, keys) if bias is None else [Separable(queries, keys), DistanceBias(bias)]
        total_BHQK = queries.matmul(keys.transpose(-1, -2))
        if bias is not None:
            total_BHQK = total_BHQK + bias.transpose(0, 1)
        row, column = (
            content.select_heads(scalar).to(prepared.dtype).view(1, -1, 1, 1)
            for scalar in (self.cls_row, self.cls_column)
        )
        total_BHQK = torch.where((prepared.keys_BK == 0)[:, None, None, :], column, total_BHQK)
        return torch.where((prepared.queries_BQ == 0)[:, None, :, None], row, total_BHQK)

    def _project(self, prepared: Prepared) -> tuple[torch.Tensor, torch.Tensor]:
        """Scaled queries and keys of the positions, (B or 1, H, Q or K, D)."""

        def project(positions: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            # Whichever projects fewer rows; while tracing, what sets no limit on the length.
            lookup_first = is_tracing() or positions.numel() < self.max_positions
            rows = nn.functional.embedding(positions, self.table) if lookup_first else self.table
            rows = nn.functional.linear(self.norm(rows).to(prepared.dtype), weight.to(prepared.dtype))
            rows = rows if lookup_first else nn.functional.embedding(positions, rows)
            return rows.view(*rows.shape[:-1], self.shape.num_heads, -1).transpose(1, 2)

        scale = (2 * self.shape.head_size) ** -0.5
        queries = project(prepared.queries_BQ, self.query_projection) * scale
        return queries, project(prepared.keys_BK, self.key_projection)
