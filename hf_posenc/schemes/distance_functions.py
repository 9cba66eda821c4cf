"""Biases that are functions of the distance, one per head: ALiBi, KERPLE and Sandwich."""

import functools
import math
from typing import Literal

import torch
from transformers import initialization as init

from ..errors import PosEncError
from . import Content, DistanceBias, Kind, LayerParameters, LayerParams, ModelShape, Options, Positions, Scheme, option
from .constants import device_constant
from .functional import BASE

SANDWICH_WIDTH = 128
"""Width of Sandwich's sinusoidal embeddings, as in the paper, whatever the model's hidden size."""


def broadcast_heads(values_H: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """One value per head, shaped and cast to multiply a tensor that has no head dimension yet."""
    return values_H.to(target).view(-1, *[1] * target.dim())


def alibi_slopes(num_heads: int) -> list[float]:
    """2^(-8h/n) for a power of two n; else the slopes of the power below, then every other slope of the power above."""
    power = 2 ** math.floor(math.log2(num_heads))
    slopes = [2 ** (-8 * head / power) for head in range(1, power + 1)]
    interpolated = [2 ** (-4 * head / power) for head in range(1, 2 * power + 1, 2)]
    return slopes + interpolated[: num_heads - power]


def init_alibi_slopes(slopes: torch.Tensor) -> None:
    init.copy_(slopes, torch.tensor(alibi_slopes(len(slopes))))


class AlibiOptions(Options):
    learned: bool | Literal["per_layer"] = option(False, "train the slopes: one set for all layers, or one per layer")
    init: Literal["paper", "neutral"] = option("paper", "how learned slopes start: as in the paper, or at zero")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.init == "neutral" and not self.learned:
            raise PosEncError("init='neutral' is for learned slopes only: add \"learned\": true")


class Alibi(Scheme[AlibiOptions, torch.Tensor]):
    """Logits fall linearly with the distance, at a different slope in each head. Encoders use it in both directions."""

    name = "alibi"
    paper = "Press et al. 2022, https://arxiv.org/abs/2108.12409"
    kind = Kind.DISTANCE
    formula = "q.k / sqrt(d) - m_h |r|"
    cost = "no parameters, or one slope per head (and layer); one bias vector per head"
    neutral = '`slopes` are 0 with `learned` and `init` = "neutral"'
    tested_against = "BLOOM and MPT of Transformers"
    recommended = {"learned": "per_layer"}
    Options = AlibiOptions
    slopes: torch.Tensor

    def __init__(self, options: AlibiOptions, shape: ModelShape) -> None:
        super().__init__(options, shape)
        self.slopes_spec = ((shape.num_heads,), init_alibi_slopes if options.init == "paper" else init.zeros_)
        if options.learned is True:
            self.add_parameters(slopes=self.slopes_spec)

    def layer_module(self) -> LayerParameters | None:
        return LayerParameters(slopes=self.slopes_spec) if self.options.learned == "per_layer" else None

    def prepare(self, positions: Positions) -> torch.Tensor:
        penalty = -positions.distances.abs().to(positions.dtype)
        if self.options.learned:
            return penalty
        slopes = device_constant(alibi_slopes(self.shape.num_heads), penalty.device, penalty.dtype)
        return broadcast_heads(slopes, penalty) * penalty

    def score(self, prepared: torch.Tensor, layer_params: LayerParams, content: Content) -> DistanceBias:
        if not self.options.learned:
            return DistanceBias(prepared)
        slopes = self.slopes if self.options.learned is True else layer_params()["slopes"]
        return DistanceBias(broadcast_heads(slopes, prepared) * prepared)


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
    tested_against = "a loop over the formula"
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


class Sandwich(Scheme[Options, torch.Tensor]):
    """The inner product of two sinusoidal embeddings, scaled down more in each further head. No parameters."""

    name = "sandwich"
    paper = "Chi et al. 2023, https://arxiv.org/abs/2212.10356"
    kind = Kind.DISTANCE
    formula = "q.k / sqrt(d) + (sum_k cos(r / 10000^(k/64)) - 64) / (8 h / H)"
    cost = "no parameters; one bias vector per head"
    tested_against = "a loop over the formula"

    def prepare(self, positions: Positions) -> torch.Tensor:
        pairs, heads = SANDWICH_WIDTH // 2, self.shape.num_heads
        distances = positions.distances.to(positions.dtype)
        product = torch.zeros_like(distances)
        for pair in range(1, pairs + 1):  # one wavelength at a time, to save memory
            product = product + torch.cos(distances * BASE ** (-2 * pair / SANDWICH_WIDTH))
        compression = torch.arange(1, heads + 1, device=distances.device, dtype=distances.dtype) * 8 / heads
        return (product - pairs) / broadcast_heads(compression, product)

    def score(self, prepared: torch.Tensor, layer_params: LayerParams, content: Content) -> DistanceBias:
        return DistanceBias(prepared)
