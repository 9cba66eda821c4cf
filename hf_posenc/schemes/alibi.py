"""A penalty that grows linearly with distance, at a slope of its own for every head."""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

import torch
from torch import nn
from transformers import initialization as init

from .base import Kind, LayerParams, ModelShape, Scheme
from .inputs import Content, Positions
from .options import Options, option
from .terms import DistanceBias


@dataclasses.dataclass(frozen=True, kw_only=True)
class AlibiOptions(Options):
    learned: bool = option(False, "make the slopes parameters")
    init: Literal["paper", "neutral"] = option("paper", "where learned slopes start: at the paper's, or at zero")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.init == "neutral" and not self.learned:
            raise ValueError("init='neutral' is for learned slopes only: add \"learned\": true")


def alibi_slopes(num_heads: int) -> list[float]:
    """2^(-8h/n) for a power of two; else those of the power below, then every other slope of the power above."""
    power = 2 ** math.floor(math.log2(num_heads))
    slopes = [2 ** (-8 * head / power) for head in range(1, power + 1)]
    between = [2 ** (-4 * head / power) for head in range(1, 2 * power + 1, 2)]
    return slopes + between[: num_heads - power]


class Alibi(Scheme):
    """A head's logits fall linearly with the distance between query and key; encoders count it both ways."""

    name = "alibi"
    paper = "Press et al. 2022, https://arxiv.org/abs/2108.12409"
    kind = Kind.DISTANCE
    formula = "q.k / sqrt(d) - m_h |r|"
    cost = "no parameters, or a slope a head; one vector a head"
    neutral = '`slopes` are 0 under `learned` and `init` = "neutral"'
    extends = True
    Options = AlibiOptions
    options: AlibiOptions

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
        return slopes.view(-1, *[1] * penalty.dim()) * penalty

    def score(self, prepared: torch.Tensor, part: LayerParams | None, content: Content) -> DistanceBias:
        if self.options.learned:
            slopes = self.slopes.to(prepared.dtype)
            prepared = slopes.view(-1, *[1] * prepared.dim()) * prepared
        return DistanceBias(prepared)
