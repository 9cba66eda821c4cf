"""DeBERTa (He et al. 2021): disentangled attention between content and relative positions."""

import functools
import math
from typing import Literal

import torch
from torch import nn
from transformers import initialization as init

from ..errors import PosEncError
from . import Content, Kind, LayerParameters, LayerParams, ModelShape, Options, Positions, Scheme, option
from .base import ParameterSpec
from .functional import init_sinusoids, init_tiled_identity, paper_or_neutral
from .terms import DistanceTable, KeyTerm, QueryTerm, Term

NORM_EPSILON, INIT_STD = 1e-7, 0.02
"""As in DeBERTa's code."""


class DebertaOptions(Options):
    terms: list[Literal["c2p", "p2c"]] = option(["c2p", "p2c"], "content to position, position to content")
    max_distance: int = option(512, "distances beyond this share a row, on either side", minimum=1)
    buckets: int = option(0, "rows per side, widening with the distance; 0: one row per distance", minimum=0)
    share_projections: bool = option(True, "project positions with the layer's query and key weights (v2, v3)")
    norm: Literal["layer_norm"] | None = option("layer_norm", "normalization of the position table (v2, v3); None: v1")
    init: Literal["neutral", "paper"] = option("neutral", "no positions, or the paper's scales and a random table")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.terms or len(set(self.terms)) < len(self.terms):
            raise PosEncError(f"terms must name 'c2p', 'p2c' or both, each once, got {self.terms!r}")
        if 0 < self.buckets < 4:
            raise PosEncError(f"buckets must be 0 (one row per distance) or at least 4, got {self.buckets}")
        exact = self.buckets // 2
        if exact and self.max_distance <= exact + 1:
            raise PosEncError(
                f"max_distance must be above {exact + 1} if buckets={self.buckets}, got {self.max_distance}"
            )


def log_buckets(relative: torch.Tensor, buckets: int, max_distance: int) -> torch.Tensor:
    """DeBERTa's bucket of query minus key. Float32 logs in DeBERTa's order, which the bucket edges depend on."""
    middle = buckets // 2
    far = relative.abs().clamp(min=middle).float()
    log_ratio = torch.log(far / middle) / torch.log(far.new_full((), (max_distance - 1) / middle))
    coarse = (torch.ceil(log_ratio * (middle - 1)) + middle).long()
    return torch.where(relative.abs() <= middle, relative, coarse * relative.sign())


class Deberta(Scheme[DebertaOptions, torch.Tensor]):
    """Queries attend to relative-position keys, and relative-position queries to keys, in addition to the content.

    All layers share the position table. With init="paper" each of the three products is scaled by
    1 / sqrt(d (1 + number of terms)). DeBERTa's dropout on the table is left out.
    """

    name = "deberta"
    paper = "He et al. 2021, https://arxiv.org/abs/2006.03654; v3: https://arxiv.org/abs/2111.09543"
    kind = Kind.CONTENT
    formula = "[q_i.k_j + q_i.K_delta + k_j.Q_delta] / sqrt(d (1 + terms)), K and Q from a table by delta = i - j"
    cost = "one table, two scalars per head and layer, v1's projections; queries and keys x rows, gathers"
    neutral = "`position_gain` and `content_change` are 0; the papers fix them at 1 and 1 / sqrt(1 + terms) - 1"
    tested_against = "DebertaV2 and Deberta (v1) of Transformers; a loop over the formula, pair by pair"
    Options = DebertaOptions
    table: torch.Tensor

    def __init__(self, options: DebertaOptions, shape: ModelShape) -> None:
        super().__init__(options, shape)
        self.span = options.buckets or options.max_distance
        # Neutral, the rows differ by distance, so that the gains have something to learn from.
        sinusoidal = functools.partial(init_sinusoids, first_position=-self.span)
        initializer = paper_or_neutral(options.init, INIT_STD, sinusoidal)
        self.add_parameters(table=((2 * self.span, shape.hidden_size), initializer))
        if options.norm:
            self.norm = nn.LayerNorm(shape.hidden_size, eps=NORM_EPSILON)

    def layer_module(self) -> LayerParameters:
        """Content is scaled by 1 + `content_change`, positions by `position_gain`: weight decay pulls to neutral."""
        terms, paper = self.options.terms, self.options.init == "paper"
        heads, width = (self.shape.num_heads,), self.shape.num_heads * self.shape.head_size
        content_change, position_gain = ((1 + len(terms)) ** -0.5 - 1, 1.0) if paper else (0.0, 0.0)
        parameters: dict[str, ParameterSpec] = {
            "content_change": (heads, functools.partial(init.constant_, val=content_change)),
            "position_gain": (heads, functools.partial(init.constant_, val=position_gain)),
        }
        initializer = paper_or_neutral(self.options.init, INIT_STD, init_tiled_identity)
        projection = ((width, self.shape.hidden_size), initializer)
        if not self.options.share_projections and "c2p" in terms:
            parameters["key_projection"] = projection
        if not self.options.share_projections and "p2c" in terms:
            parameters |= {"query_projection": projection, "query_bias": ((width,), init.zeros_)}
        return LayerParameters(**parameters)

    def prepare(self, positions: Positions) -> torch.Tensor:
        relative = -positions.distances
        if self.options.buckets:
            relative = log_buckets(relative, self.options.buckets, self.options.max_distance)
        return (relative + self.span).clamp(0, 2 * self.span - 1)

    def content_scale(self, prepared: torch.Tensor, layer_params: LayerParams) -> torch.Tensor:
        return 1 + layer_params()["content_change"][None, :, None]

    def score(self, prepared: torch.Tensor, layer_params: LayerParams, content: Content) -> list[Term]:
        params, terms = layer_params(), self.options.terms
        table = self.norm(self.table) if self.options.norm else self.table

        def project(name: str) -> torch.Tensor:
            rows = nn.functional.linear(table, params[f"{name}_projection"], params.get(f"{name}_bias"))
            return content.select_heads(rows.view(len(rows), self.shape.num_heads, -1).transpose(0, 1))

        gains_H = content.select_heads(params["position_gain"])
        scale = gains_H[:, None, None] * (content.scaling / math.sqrt(1 + len(terms)))
        shared = content.project(table.to(content.query_BHQD)) if self.options.share_projections else None
        result: list[Term] = []
        if "c2p" in terms:
            keys = project("key") if shared is None else shared[1]
            result.append(QueryTerm(DistanceTable(keys * scale, prepared)))
        if "p2c" in terms:
            queries = project("query") if shared is None else shared[0]
            result.append(KeyTerm(DistanceTable(queries * scale, prepared)))
        return result
