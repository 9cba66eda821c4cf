"""Sines and cosines of the position at geometrically spaced wavelengths, mixed into the word embeddings."""

from __future__ import annotations

import dataclasses
from typing import Literal

import torch

from .base import Kind
from .functional import BASE, sinusoids
from .inputs import Positions
from .mixing import InputScheme, MixOptions
from .options import option


@dataclasses.dataclass(frozen=True, kw_only=True)
class SinusoidalOptions(MixOptions):
    base: float = option(
        BASE,
        "longest wavelength over 2 pi",
        lambda base: None if base > 1 else "must be above 1",
    )
    layout: Literal["interleaved", "halves"] = option(
        "interleaved", "sine at even and cosine at odd features, or all sines first"
    )


class Sinusoidal(InputScheme):
    """Fixed sines and cosines of the position, mixed into the word embeddings."""

    name = "sinusoidal"
    paper = "Vaswani et al. 2017, https://arxiv.org/abs/1706.03762"
    kind = Kind.INPUT
    formula = "x_i + [sin(i / base^(2k/E)), cos(i / base^(2k/E))]"
    cost = "no parameters; one table a forward"
    neutral = 'no parameters but a mix\'s, which leaves the position out under `mix_init` = "neutral"'
    extends = True
    Options = SinusoidalOptions
    options: SinusoidalOptions

    def position_embeddings(self, positions: Positions) -> torch.Tensor:
        base, layout = self.options.base, self.options.layout
        return sinusoids(positions.queries_BQ, self.position_size, base, layout, positions.dtype)
