"""KERPLE (Chi et al. 2022): a logarithmic or power-law distance penalty, learned per head."""

import functools
from typing import Literal

import torch
from transformers import initialization as init

from . import Content, DistanceBias, Kind, LayerParameters, LayerParams, Options, Positions, Scheme, option
from .functional import broadcast_heads


class KerpleOptions(Options):
    kind: Literal["log", "power"] = option("log", "-p ln(1 + a |r|), or -a |r|^p with p at most 2")
    init: Literal["neutral", "paper"] = option("neutral", "no penalty, or as in the paper: p uniform to 2, a to 1")


class Kerple(Scheme[KerpleOptions, torch.Tensor]):
    """Logits fall with the distance along a logarithmic or power-law kernel that every head of every layer learns."""

    name = "kerple"
    paper = "Chi et al. 2022, https://arxiv.org/abs/2205.09921"
    kind = Kind.DISTANCE
    formula = "q.k / sqrt(d) - p ln(1 + a |r|), or - a |r|^p"
    cost = "two scalars per head and layer; one bias vector per head"
    neutral = "`p` (log) or `a` (power) is 0"
    extends = True
    Options = KerpleOptions

    def layer_module(self) -> LayerParameters:
        heads, log = (self.shape.num_heads,), self.options.kind == "log"
        if self.options.init == "paper":
            a, p = (functools.partial(init.uniform_, a=0.0, b=limit) for limit in (1.0, 2.0))
        else:  # the factor in front of the kernel is zero
            a, p = (init.ones_, init.zeros_) if log else (init.zeros_, init.ones_)
        return LayerParameters(a=(heads, a), p=(heads, p))

    def prepare(self, positions: Positions) -> torch.Tensor:
        return positions.distances.abs().to(positions.dtype)

    def score(self, prepared: torch.Tensor, layer_params: LayerParams, content: Content) -> DistanceBias:
        a, p = (broadcast_heads(layer_params()[name], prepared) for name in ("a", "p"))
        if self.options.kind == "log":
            return DistanceBias(-p.clamp(min=0) * torch.log1p(a.clamp(min=0) * prepared))
        # A power has no finite gradient at distance 0, where the penalty is 0 for all parameters.
        power = prepared.clamp(min=1) ** p.clamp(min=1e-2, max=2)
        return DistanceBias(-a.clamp(min=0) * torch.where(prepared > 0, power, torch.zeros_like(power)))
