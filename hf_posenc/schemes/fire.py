"""A bias learned as a function of the distance relative to how far the query can look back."""

from __future__ import annotations

import dataclasses
from typing import Literal

import torch
from torch import nn
from transformers import initialization as init

from .base import Kind, LayerModule, LayerParams, Scheme
from .inputs import Content, Positions
from .options import Options, option

UNITS = 32
START_RATE, START_LENGTH = 0.1, 512.0
"""Where the paper's c and L begin: the rate inside of the logarithm, and the length below which it is absolute."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class FireOptions(Options):
    init: Literal["neutral", "paper"] = option(
        "neutral", "start as no bias at all (the last layer is zero), or as the paper does, at random"
    )


class Network(LayerModule):
    """One number in, one a head out, through 32 rectified units; and the two numbers that scale what goes in."""

    def __init__(self, num_heads: int, start: str) -> None:
        super().__init__()
        self.start = start
        self.rate = nn.Parameter(torch.empty(()))
        self.length = nn.Parameter(torch.empty(()))
        self.inner_weight, self.inner_bias = (nn.Parameter(torch.empty(UNITS)) for _ in range(2))
        self.outer_weight = nn.Parameter(torch.empty(num_heads, UNITS))
        self.outer_bias = nn.Parameter(torch.empty(num_heads))

    def reset_parameters(self) -> None:
        init.constant_(self.rate, START_RATE)
        init.constant_(self.length, START_LENGTH)
        if self.start == "paper":
            for inner in (self.inner_weight, self.inner_bias):
                init.uniform_(inner, -1.0, 1.0)
            for outer in (self.outer_weight, self.outer_bias):
                init.uniform_(outer, -(UNITS**-0.5), UNITS**-0.5)
        else:  # corners at even steps over what goes in, so that any curve can be learned from there
            init.ones_(self.inner_weight)
            init.copy_(self.inner_bias, -torch.arange(UNITS) / UNITS)
            init.zeros_(self.outer_weight)
            init.zeros_(self.outer_bias)

    def forward(self, distances_BQK: torch.Tensor, queries_BQ: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """(B, H, Q, K)."""
        rate, length = self.rate.to(dtype).abs(), self.length.to(dtype).abs()
        reach = torch.maximum(queries_BQ.to(dtype), length).unsqueeze(-1)
        relative = torch.log1p(rate * distances_BQK.to(dtype).abs()) / torch.log1p(rate * reach)
        return self.through(relative).movedim(0, 1)

    def through(self, inputs: torch.Tensor) -> torch.Tensor:
        """The network's output for each head, (H, ...), without ever holding its 32 units for all inputs.

        Rectified units of one input make a function of straight pieces, with a corner for each unit. So the pieces
        are found once, and each input is looked up: its piece's slope times the input, plus its piece's height.
        """
        dtype = inputs.dtype
        weight, bias, outer = (p.to(dtype) for p in (self.inner_weight, self.inner_bias, self.outer_weight))
        safe = torch.where(weight == 0, torch.ones_like(weight), weight)
        corners, order = torch.where(weight == 0, torch.full_like(bias, float("inf")), -bias / safe).sort()
        rising, falling = (weight > 0).to(dtype), ((weight < 0) | ((weight == 0) & (bias > 0))).to(dtype)

        def by_piece(per_unit: torch.Tensor) -> torch.Tensor:
            at_start = (per_unit * falling).sum(-1, keepdim=True)
            changes = (per_unit * (rising - (weight < 0).to(dtype)))[..., order]
            return torch.cat([at_start, at_start + changes.cumsum(-1)], dim=-1)

        pieces = torch.searchsorted(corners.detach(), inputs.detach().contiguous())
        slopes, heights = by_piece(outer * weight), by_piece(outer * bias)
        tail = (-1, *[1] * inputs.dim())
        return slopes[:, pieces] * inputs + heights[:, pieces] + self.outer_bias.to(dtype).view(tail)


class Fire(Scheme):
    """A small network of each layer turns the distance, relative to the query's position, into a bias for each head."""

    name = "fire"
    paper = "Li et al. 2024, https://arxiv.org/abs/2310.04418"
    kind = Kind.DISTANCE
    formula = "q.k / sqrt(d) + f(ln(c |r| + 1) / ln(c max(i, L) + 1)), f a network 1 -> 32 -> H"
    cost = "a small network a layer; a bias of queries x keys a head, as it depends on i too"
    neutral = "`outer_weight` and `outer_bias` are 0"
    extends = True
    Options = FireOptions
    options: FireOptions

    def layer_module(self) -> Network:
        return Network(self.shape.num_heads, self.options.init)

    def prepare(self, positions: Positions) -> tuple[torch.Tensor, torch.Tensor, torch.dtype]:
        return positions.distances_BQK(), positions.queries_BQ, positions.dtype

    def score(
        self, prepared: tuple[torch.Tensor, torch.Tensor, torch.dtype], part: LayerParams | None, content: Content
    ) -> torch.Tensor:
        assert part is not None
        return part(*prepared)
