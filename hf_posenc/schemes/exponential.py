"""Exponentials of the position that fade at geometrically spread rates, projected to the width. No parameters."""

from __future__ import annotations

import dataclasses

import torch

from .base import Kind, ModelShape
from .functional import project, sample_frequencies
from .inputs import Positions
from .mixing import InputScheme, MixOptions
from .options import at_least, option


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExponentialOptions(MixOptions):
    rates: int = option(
        8, "how many: the slowest fades over all of max_positions, the fastest over one position", at_least(1)
    )
    max_positions: int | None = option(
        None, "the position at which the slowest has fallen to 1/e; None: the model's own length", at_least(2)
    )


class Exponential(InputScheme):
    """exp(-rate * position / max_positions) for several rates, each along a direction of its own in the embedding."""

    name = "exponential"
    paper = "no single one: fixed functions of the position, as sinusoids are (Vaswani et al. 2017)"
    kind = Kind.INPUT
    formula = "x_i + sum_k exp(-n^(k / (rates - 1)) i / n) w_k, w_k orthonormal"
    cost = "no parameters; one table a forward"
    neutral = 'no parameters but a mix\'s, which leaves the position out under `mix_init` = "neutral"'
    extends = True
    Options = ExponentialOptions
    options: ExponentialOptions

    def __init__(self, options: ExponentialOptions, shape: ModelShape) -> None:
        super().__init__(options, shape)
        self.max_positions = options.max_positions or max(shape.max_positions, 2)
        self.waves = sample_frequencies(options.rates, self.position_size, "exponential: rates")

    def position_embeddings(self, positions: Positions) -> torch.Tensor:
        places = positions.queries_BQ.clamp(min=0).to(positions.dtype).unsqueeze(-1) / self.max_positions
        steps = torch.arange(self.options.rates, device=places.device, dtype=places.dtype)
        rates = self.max_positions ** (steps / max(self.options.rates - 1, 1))
        values = torch.exp(-rates * places)
        return project(values, self.waves, self.position_size)
