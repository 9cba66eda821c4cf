"""Disentangled attention: content meets position, and position meets content, by a table of relative positions."""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

import torch
from torch import nn
from transformers import initialization as init

from .base import Kind, LayerParameters, LayerParams, ModelShape, Scheme
from .functional import BASE, sinusoids, tiled_identity
from .inputs import Content, Positions
from .options import Options, at_least, option
from .terms import DistanceTable, KeyTerm, QueryTerm, Term

NORM_EPSILON, SPREAD = 1e-7, 0.02
"""Of DeBERTa's own layer norms and of its initialisation."""


def _are_terms(terms: list[str]) -> str | None:
    return None if terms and len(set(terms)) == len(terms) else "must name one or both, each once"


def _are_buckets(buckets: int) -> str | None:
    return None if buckets == 0 or buckets >= 4 else "must be 0 (none) or at least 4"


@dataclasses.dataclass(frozen=True, kw_only=True)
class DebertaOptions(Options):
    terms: list[Literal["c2p", "p2c"]] = option(
        ["c2p", "p2c"],
        "content to position (query . position key), position to content (position query . key)",
        _are_terms,
    )
    max_distance: int = option(512, "distance from which on all keys share a row, on either side", at_least(1))
    buckets: int = option(0, "rows on either side, widening with the distance; 0: one for each distance", _are_buckets)
    share_projections: bool = option(
        True, "send positions through the layer's own query and key projections (v2, v3); false: through their own (v1)"
    )
    norm: Literal["layer_norm"] | None = option("layer_norm", "a norm on the table of positions (v2, v3), or none (v1)")
    init: Literal["neutral", "paper"] = option(
        "neutral", "content as it was and positions silent, or the paper's scales and a table at random"
    )


def log_buckets(relative: torch.Tensor, buckets: int, max_distance: int) -> torch.Tensor:
    """Query minus key, made coarser from half the buckets on. In float32 and DeBERTa's order: edges depend on it."""
    middle = buckets // 2
    far = relative.abs().clamp(min=middle).float()
    widening = torch.log(far / middle) / torch.log(torch.tensor((max_distance - 1) / middle, device=far.device))
    coarse = (torch.ceil(widening * (middle - 1)) + middle).long()
    return torch.where(relative.abs() <= middle, relative, coarse * relative.sign())


class LayerScales(LayerParameters):
    """What a layer has of its own: how much content and positions count, and projections unless they are shared.

    Content is scaled by 1 + `content_change`, positions by `position_gain`: zero is neutral for both, so that weight
    decay pulls that way and not towards a layer without content.
    """

    def __init__(self, shape: ModelShape, options: DebertaOptions) -> None:
        super().__init__()
        self.options = options
        self.content_change = nn.Parameter(torch.empty(shape.num_heads))
        self.position_gain = nn.Parameter(torch.empty(shape.num_heads))
        if not options.share_projections:
            width = shape.num_heads * shape.head_size
            if "c2p" in options.terms:
                self.key_projection = nn.Parameter(torch.empty(width, shape.hidden_size))
            if "p2c" in options.terms:
                self.query_projection = nn.Parameter(torch.empty(width, shape.hidden_size))
                self.query_bias = nn.Parameter(torch.empty(width))

    def reset_parameters(self) -> None:
        paper = self.options.init == "paper"
        init.constant_(self.content_change, (1 + len(self.options.terms)) ** -0.5 - 1 if paper else 0.0)
        init.constant_(self.position_gain, 1.0 if paper else 0.0)
        for name in ("key_projection", "query_projection"):
            if hasattr(self, name):
                weight = getattr(self, name)
                if paper:
                    init.normal_(weight, std=SPREAD)
                else:
                    init.copy_(weight, tiled_identity(*weight.shape))
        if hasattr(self, "query_bias"):
            init.zeros_(self.query_bias)


class Deberta(Scheme):
    """Queries meet the keys of relative positions, and keys their queries, beside the product of contents.

    Each of the three is scaled by 1 / sqrt(d (1 + number of terms)) under init = "paper". The table is one for all
    layers. DeBERTa's dropout on it is left out.
    """

    name = "deberta"
    paper = "He et al. 2021, https://arxiv.org/abs/2006.03654; v3: https://arxiv.org/abs/2111.09543"
    kind = Kind.CONTENT
    formula = "[q_i.k_j + q_i.K_delta + k_j.Q_delta] / sqrt(d (1 + terms)), K and Q of a table by delta = i - j"
    cost = "a table for all layers, two numbers a head and layer, v1's projections; queries and keys x rows, gathers"
    neutral = "`position_gain` and `content_change` are 0; the papers have neither: 1 and 1 / sqrt(1 + terms) - 1 there"
    extends = True
    Options = DebertaOptions
    options: DebertaOptions

    def __init__(self, options: DebertaOptions, shape: ModelShape) -> None:
        super().__init__(options, shape)
        if options.buckets and options.max_distance - 1 <= options.buckets // 2:
            raise ValueError(
                f"deberta: max_distance must be above {options.buckets // 2 + 1}, where buckets begin to widen "
                f"(buckets={options.buckets}), got {options.max_distance}"
            )
        self.span = options.buckets or options.max_distance
        self.table = nn.Parameter(torch.empty(2 * self.span, shape.hidden_size))
        if options.norm:
            self.norm = nn.LayerNorm(shape.hidden_size, eps=NORM_EPSILON)

    def layer_module(self) -> LayerScales:
        return LayerScales(self.shape, self.options)

    def reset_parameters(self) -> None:
        if self.options.init == "paper":
            init.normal_(self.table, std=SPREAD)
        else:  # a table that tells distances apart, so that there is something to learn from
            places = torch.arange(-self.span, self.span)
            init.copy_(self.table, sinusoids(places, self.shape.hidden_size, BASE, "halves", torch.float32))

    def prepare(self, positions: Positions) -> torch.Tensor:
        relative = -positions.distances
        if self.options.buckets:
            relative = log_buckets(relative, self.options.buckets, self.options.max_distance)
        return (relative + self.span).clamp(0, 2 * self.span - 1)

    def content_scale(self, part: LayerParams | None) -> torch.Tensor:
        assert part is not None
        return 1 + part()["content_change"]

    def score(self, prepared: torch.Tensor, part: LayerParams | None, content: Content) -> list[Term]:
        assert part is not None
        own, options = part(), self.options
        table = self.norm(self.table) if options.norm else self.table
        if options.share_projections:
            queries, keys = content.project(table)
        else:
            heads = (self.shape.num_heads, self.shape.head_size)
            linear = nn.functional.linear
            if "c2p" in options.terms:
                keys = linear(table, own["key_projection"]).unflatten(-1, heads).transpose(0, 1)
            if "p2c" in options.terms:
                queries = linear(table, own["query_projection"], own["query_bias"]).unflatten(-1, heads).transpose(0, 1)
        scale = own["position_gain"][:, None, None] * (content.scaling / math.sqrt(1 + len(options.terms)))
        terms: list[Term] = []
        if "c2p" in options.terms:
            terms.append(QueryTerm(DistanceTable(keys * scale, prepared)))
        if "p2c" in options.terms:
            terms.append(KeyTerm(DistanceTable(queries * scale, prepared)))
        return terms
