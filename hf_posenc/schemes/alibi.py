"""ALiBi (Press et al. 2022): a linear distance penalty per head."""

import math
from typing import Literal

import torch
from torch import nn
from transformers import initialization as init

from ..errors import PosEncError
from . import Content, DistanceBias, Kind, LayerParams, ModelShape, Options, Positions, Scheme, option
from .functional import broadcast_heads


class AlibiOptions(Options):
    learned: bool = option(False, "make the slopes trainable parameters")
    init: Literal["paper", "neutral"] = option("paper", "how learned slopes start: as in the paper, or at zero")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.init == "neutral" and not self.learned:
            raise PosEncError("init='neutral' is for learned slopes only: add \"learned\": true")


def alibi_slopes(num_heads: int) -> list[float]:
    """2^(-8h/n) for a power of two n; else the slopes of the power below, then every other slope of the power above."""
    power = 2 ** math.floor(math.log2(num_heads))
    slopes = [2 ** (-8 * head / power) for head in range(1, power + 1)]
    interpolated = [2 ** (-4 * head / power) for head in range(1, 2 * power + 1, 2)]
    return slopes + interpolated[: num_heads - power]


class Alibi(Scheme[AlibiOptions, torch.Tensor]):
    """Logits fall linearly with the distance, at a different slope in each head. Encoders use it in both directions."""

    name = "alibi"
    paper = "Press et al. 2022, https://arxiv.org/abs/2108.12409"
    kind = Kind.DISTANCE
    formula = "q.k / sqrt(d) - m_h |r|"
    cost = "no parameters, or one slope per head; one bias vector per head"
    neutral = '`slopes` are 0 with `learned` and `init` = "neutral"'
    extends = True
    Options = AlibiOptions

    def __init__(self, options: AlibiOptions, shape: ModelShape) -> None:
        super().__init__(options, shape)
        if options.learned:
            self.slopes = nn.Parameter(torch.empty(shape.num_heads))

    def reset_parameters(self) -> None:
        if self.options.learned and self.options.init == "neutral":
            init.zeros_(self.slopes)
        elif self.options.learned:
            init.copy_(self.slopes, torch.tensor(alibi_slopes(self.shape.num_heads)))

    def prepare(self, positions: Positions) -> torch.Tensor:
        penalty = -positions.distances.abs().to(positions.dtype)
        if self.options.learned:
            return penalty
        slopes = torch.tensor(alibi_slopes(self.shape.num_heads), device=penalty.device, dtype=penalty.dtype)
        return broadcast_heads(slopes, penalty) * penalty

    def score(self, prepared: torch.Tensor, layer_params: LayerParams, content: Content) -> DistanceBias:
        return DistanceBias(broadcast_heads(self.slopes, prepared) * prepared if self.options.learned else prepared)
