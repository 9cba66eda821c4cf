"""Input embeddings that are fixed functions of the position: sinusoids, polynomials, exponentials."""

import random
from typing import Literal

import torch

from ..errors import PosEncError
from . import InputScheme, MixOptions, ModelShape, Positions, option
from .constants import device_constant
from .functional import BASE, sinusoids

SEED = 0
NO_PAPER = "no single paper: a fixed function of the position, like sinusoids (Vaswani et al. 2017)"


class SinusoidalOptions(MixOptions):
    base: float = option(BASE, "longest wavelength over 2 pi", above=1)
    layout: Literal["interleaved", "halves"] = option("interleaved", "sines and cosines in turn, or all sines first")


class Sinusoidal(InputScheme[SinusoidalOptions]):
    """Fixed sines and cosines of the position, combined with the token embeddings."""

    name = "sinusoidal"
    paper = "Vaswani et al. 2017, https://arxiv.org/abs/1706.03762"
    formula = "x_i + [sin(i / base^(2k/E)), cos(i / base^(2k/E))]"
    cost = "no parameters; one table per forward pass"
    tested_against = "the tables of DistilBERT and RoFormer of Transformers"
    Options = SinusoidalOptions

    def position_embeddings(self, positions: Positions) -> torch.Tensor:
        base, layout = self.options.base, self.options.layout
        return sinusoids(positions.queries_BQ, self.position_size, base, layout, positions.dtype)


def sample_dct_rows(count: int, width: int, option: str = "count") -> list[int]:
    """Choose rows of a discrete cosine transform by a seeded shuffle that is the same in every Python release."""
    if count >= width:
        raise PosEncError(f"{option} must be below {width}, the width it is projected to, got {count}")
    shuffle = random.Random(SEED)
    return sorted(range(1, width), key=lambda _: shuffle.random())[:count]


def project_to_dct_rows(values: torch.Tensor, rows: list[int], width: int) -> torch.Tensor:
    """Sum the rows of an orthonormal transform, weighted by values (..., rows): (..., width).

    The rows are computed by a formula: no buffer to store, no platform-dependent factorization.
    """
    features = torch.arange(width, device=values.device, dtype=values.dtype) + 0.5
    frequencies = device_constant(rows, values.device, values.dtype)
    scale: float = (2 / width) ** 0.5
    directions = torch.cos(torch.pi / width * frequencies[:, None] * features) * scale
    device = values.device.type
    with torch.autocast("cpu" if device == "meta" else device, enabled=False):  # it would merge neighboring positions
        return values @ directions


class PolynomialOptions(MixOptions):
    degree: int = option(3, "the highest degree", minimum=1)
    max_positions: int | None = option(None, "the end of the polynomials' domain; None: the model's length", minimum=2)


class Polynomial(InputScheme[PolynomialOptions]):
    """Chebyshev polynomials of the position, each along its own direction of the embedding.

    The argument runs from -1 to 1 over `max_positions` and stays at 1 beyond, so that embeddings are bounded.
    """

    name = "polynomial"
    paper = NO_PAPER
    formula = "x_i + sum_k T_k(t_i) w_k, t_i = 2 min(i, n - 1) / (n - 1) - 1, T_k Chebyshev, w_k orthonormal"
    cost = "no parameters; one table per forward pass"
    tested_against = "NumPy's Chebyshev polynomials, along orthonormal directions"
    Options = PolynomialOptions

    def __init__(self, options: PolynomialOptions, shape: ModelShape) -> None:
        super().__init__(options, shape)
        self.max_positions = options.max_positions or max(shape.max_positions, 2)
        self.dct_rows = sample_dct_rows(options.degree, self.position_size, "polynomial: degree")

    def position_embeddings(self, positions: Positions) -> torch.Tensor:
        clamped = positions.queries_BQ.clamp(min=0, max=self.max_positions - 1).to(positions.dtype)
        argument = 2 * clamped / (self.max_positions - 1) - 1
        polynomials = [torch.ones_like(argument), argument]
        for _ in range(self.options.degree - 1):
            polynomials.append(2 * argument * polynomials[-1] - polynomials[-2])
        values = torch.stack(polynomials[1:], dim=-1)  # the constant carries no position
        return project_to_dct_rows(values, self.dct_rows, self.position_size)


class ExponentialOptions(MixOptions):
    rates: int = option(8, "number of rates, from decay over max_positions to decay over one position", minimum=1)
    max_positions: int | None = option(None, "where the slowest rate reaches 1/e; None: the model's length", minimum=2)


class Exponential(InputScheme[ExponentialOptions]):
    """exp(-rate * position / max_positions) at several rates, each along its own direction of the embedding."""

    name = "exponential"
    paper = NO_PAPER
    formula = "x_i + sum_k exp(-n^(k / (rates - 1)) i / n) w_k, w_k orthonormal"
    cost = "no parameters; one table per forward pass"
    tested_against = "a loop over the formula"
    Options = ExponentialOptions

    def __init__(self, options: ExponentialOptions, shape: ModelShape) -> None:
        super().__init__(options, shape)
        self.max_positions = options.max_positions or max(shape.max_positions, 2)
        self.dct_rows = sample_dct_rows(options.rates, self.position_size, "exponential: rates")

    def position_embeddings(self, positions: Positions) -> torch.Tensor:
        relative = positions.queries_BQ.clamp(min=0).to(positions.dtype).unsqueeze(-1) / self.max_positions
        steps = torch.arange(self.options.rates, device=relative.device, dtype=relative.dtype)
        rates = self.max_positions ** (steps / max(self.options.rates - 1, 1))
        return project_to_dct_rows(torch.exp(-rates * relative), self.dct_rows, self.position_size)
