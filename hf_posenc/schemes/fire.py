"""FIRE (Li et al. 2024): an MLP of the distance relative to the query's position, as a bias per head."""

import functools
from typing import Literal

import torch
from transformers import initialization as init

from . import Content, Kind, LayerParameters, LayerParams, Options, Positions, Scheme, option

HIDDEN_UNITS = 32
INIT_RATE, INIT_LENGTH = 0.1, 512.0
"""Where the paper's c and L start: the rate inside the logarithm, and the smallest length that distances relate to."""
Prepared = tuple[torch.Tensor, torch.Tensor, torch.dtype]


class FireOptions(Options):
    init: Literal["neutral", "paper"] = option("neutral", "no bias (a zero output layer), or random as in the paper")


def piecewise_mlp(params: dict[str, torch.Tensor], inputs: torch.Tensor) -> torch.Tensor:
    """Apply the 1 -> 32 -> H ReLU network to each input, (H, ...), without holding 32 activations per input.

    A ReLU network of one input is piecewise linear with a kink per hidden unit. The slope and offset of each piece are
    computed once, and each input looks up its piece.
    """
    weight, bias, outer = (params[name].to(inputs.dtype) for name in ("inner_weight", "inner_bias", "outer_weight"))
    safe = torch.where(weight == 0, torch.ones_like(weight), weight)
    kinks, order = torch.where(weight == 0, torch.full_like(bias, float("inf")), -bias / safe).sort()
    rising, falling = (weight > 0).to(inputs.dtype), (weight < 0).to(inputs.dtype)
    active_at_start = falling + ((weight == 0) & (bias > 0)).to(inputs.dtype)

    def by_piece(per_unit: torch.Tensor) -> torch.Tensor:
        start = (per_unit * active_at_start).sum(-1, keepdim=True)
        changes = (per_unit * (rising - falling))[..., order]
        return torch.cat([start, start + changes.cumsum(-1)], dim=-1)

    pieces = torch.searchsorted(kinks.detach(), inputs.detach().contiguous())
    slopes, offsets = by_piece(outer * weight), by_piece(outer * bias)
    outer_bias = params["outer_bias"].to(inputs.dtype).view(-1, *[1] * inputs.dim())
    return slopes[:, pieces] * inputs + offsets[:, pieces] + outer_bias


def _init_even_kinks(bias: torch.Tensor) -> None:
    init.copy_(bias, -torch.arange(HIDDEN_UNITS) / HIDDEN_UNITS)


class Fire(Scheme[FireOptions, Prepared]):
    """A small MLP per layer maps the distance, relative to the query's position, to a bias per head."""

    name = "fire"
    paper = "Li et al. 2024, https://arxiv.org/abs/2310.04418"
    kind = Kind.DISTANCE
    formula = "q.k / sqrt(d) + f(ln(c |r| + 1) / ln(c max(i, L) + 1)), f an MLP 1 -> 32 -> H"
    cost = "a small MLP per layer; a bias of queries x keys per head, as it depends on i too"
    neutral = "`outer_weight` and `outer_bias` are 0"
    tested_against = "an MLP applied to every pair"
    Options = FireOptions

    def layer_module(self) -> LayerParameters:
        heads, bound, uniform = self.shape.num_heads, HIDDEN_UNITS**-0.5, init.uniform_
        paper = self.options.init == "paper"
        inner, outer = (functools.partial(uniform, a=-limit, b=limit) for limit in (1.0, bound))
        return LayerParameters(
            # Of one axis, because FSDP and ZeRO cannot divide parameters without any.
            rate=((1,), functools.partial(init.constant_, val=INIT_RATE)),
            length=((1,), functools.partial(init.constant_, val=INIT_LENGTH)),
            # Neutral, kinks are spread evenly over the inputs, so that any curve can be learned.
            inner_weight=((HIDDEN_UNITS,), inner if paper else init.ones_),
            inner_bias=((HIDDEN_UNITS,), inner if paper else _init_even_kinks),
            outer_weight=((heads, HIDDEN_UNITS), outer if paper else init.zeros_),
            outer_bias=((heads,), outer if paper else init.zeros_),
        )

    def prepare(self, positions: Positions) -> Prepared:
        return positions.distances_BQK(), positions.queries_BQ, positions.dtype

    def score(self, prepared: Prepared, layer_params: LayerParams, content: Content) -> torch.Tensor:
        (distances_BQK, queries_BQ, dtype), params = prepared, layer_params()
        rate, length = params["rate"].to(dtype).abs(), params["length"].to(dtype).abs()
        reach = torch.maximum(queries_BQ.to(dtype), length).unsqueeze(-1)
        relative = torch.log1p(rate * distances_BQK.to(dtype).abs()) / torch.log1p(rate * reach)
        outer = {name: content.select_heads(params[name]) for name in ("outer_weight", "outer_bias")}
        return piecewise_mlp({**params, **outer}, relative).movedim(0, 1)
