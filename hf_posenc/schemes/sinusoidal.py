"""Sinusoidal position embeddings (Vaswani et al. 2017): sines and cosines at geometric wavelengths."""

from typing import Literal

import torch

from . import InputScheme, MixOptions, Positions, option
from .functional import BASE, sinusoids


class SinusoidalOptions(MixOptions):
    base: float = option(BASE, "longest wavelength over 2 pi", above=1)
    layout: Literal["interleaved", "halves"] = option("interleaved", "sines and cosines in turn, or all sines first")


class Sinusoidal(InputScheme[SinusoidalOptions]):
    """Fixed sines and cosines of the position, combined with the token embeddings."""

    name = "sinusoidal"
    paper = "Vaswani et al. 2017, https://arxiv.org/abs/1706.03762"
    formula = "x_i + [sin(i / base^(2k/E)), cos(i / base^(2k/E))]"
    cost = "no parameters; one table per forward pass"
    extends = True
    Options = SinusoidalOptions

    def position_embeddings(self, positions: Positions) -> torch.Tensor:
        base, layout = self.options.base, self.options.layout
        return sinusoids(positions.queries_BQ, self.position_size, base, layout, positions.dtype)
