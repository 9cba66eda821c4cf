"""A penalty that grows with distance as a logarithm or a power, its shape learned by every head."""

from __future__ import annotations

import dataclasses
from typing import Literal

import torch
from torch import nn
from transformers import initialization as init

from .base import Kind, LayerModule, LayerParams, Scheme
from .inputs import Content, Positions
from .options import Options, option
from .terms import DistanceBias


@dataclasses.dataclass(frozen=True, kw_only=True)
class KerpleOptions(Options):
    kind: Literal["log", "power"] = option("log", "-p ln(1 + a |r|), or -a |r|^p with p at most 2")
    init: Literal["neutral", "paper"] = option(
        "neutral", "start as no penalty at all, or as the paper does: p uniform up to 2, a uniform up to 1"
    )


class Kernel(LayerModule):
    """The two numbers a and p of every head of one layer. Neutral: the factor in front (p or a) is zero."""

    def __init__(self, num_heads: int, options: KerpleOptions) -> None:
        super().__init__()
        self.options = options
        self.a = nn.Parameter(torch.empty(num_heads))
        self.p = nn.Parameter(torch.empty(num_heads))

    def reset_parameters(self) -> None:
        if self.options.init == "paper":
            init.uniform_(self.a, 0.0, 1.0)
            init.uniform_(self.p, 0.0, 2.0)
        else:
            init.constant_(self.a, 1.0 if self.options.kind == "log" else 0.0)
            init.constant_(self.p, 0.0 if self.options.kind == "log" else 1.0)

    def forward(self, distance: torch.Tensor) -> torch.Tensor:
        a, p = (number.to(distance.dtype).view(-1, *[1] * distance.dim()) for number in (self.a, self.p))
        if self.options.kind == "log":
            return -p.clamp(min=0) * torch.log1p(a.clamp(min=0) * distance)
        # A power has no finite slope at distance zero, where the penalty is zero whatever its parameters are.
        power = distance.clamp(min=1) ** p.clamp(min=1e-2, max=2)
        return -a.clamp(min=0) * torch.where(distance > 0, power, torch.zeros_like(power))


class Kerple(Scheme):
    """Logits fall with the distance along a kernel, logarithmic or a power, that every head of every layer learns."""

    name = "kerple"
    paper = "Chi et al. 2022, https://arxiv.org/abs/2205.09921"
    kind = Kind.DISTANCE
    formula = "q.k / sqrt(d) - p ln(1 + a |r|), or - a |r|^p"
    cost = "two numbers a head and layer; one vector a head"
    neutral = "`p` (log) or `a` (power) is 0"
    extends = True
    Options = KerpleOptions
    options: KerpleOptions

    def layer_module(self) -> Kernel:
        return Kernel(self.shape.num_heads, self.options)

    def prepare(self, positions: Positions) -> torch.Tensor:
        return positions.distances.abs().to(positions.dtype)

    def score(self, prepared: torch.Tensor, part: LayerParams | None, content: Content) -> DistanceBias:
        assert part is not None
        return DistanceBias(part(prepared))
