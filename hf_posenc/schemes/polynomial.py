"""Orthogonal polynomials of the position, projected to the width of the model. No parameters."""

from __future__ import annotations

import dataclasses

import torch

from .base import Kind, ModelShape
from .functional import project, sample_frequencies
from .inputs import Positions
from .mixing import InputScheme, MixOptions
from .options import at_least, option


@dataclasses.dataclass(frozen=True, kw_only=True)
class PolynomialOptions(MixOptions):
    degree: int = option(3, "the highest power of the position", at_least(1))
    max_positions: int | None = option(
        None, "where the range of the polynomials ends; None: the model's own length", at_least(2)
    )


class Polynomial(InputScheme):
    """Chebyshev polynomials of the position, each along a direction of its own in the embedding.

    The argument runs from -1 to 1 over `max_positions` and stays at 1 from there on, so that it is bounded.
    """

    name = "polynomial"
    paper = "no single one: fixed functions of the position, as sinusoids are (Vaswani et al. 2017)"
    kind = Kind.INPUT
    formula = "x_i + sum_k T_k(t_i) w_k, t_i = 2 min(i, n - 1) / (n - 1) - 1, T_k Chebyshev, w_k orthonormal"
    cost = "no parameters; one table a forward"
    neutral = 'no parameters but a mix\'s, which leaves the position out under `mix_init` = "neutral"'
    extends = True
    Options = PolynomialOptions
    options: PolynomialOptions

    def __init__(self, options: PolynomialOptions, shape: ModelShape) -> None:
        super().__init__(options, shape)
        self.max_positions = options.max_positions or max(shape.max_positions, 2)
        self.waves = sample_frequencies(options.degree, self.position_size, "polynomial: degree")

    def position_embeddings(self, positions: Positions) -> torch.Tensor:
        places = positions.queries_BQ.clamp(min=0, max=self.max_positions - 1).to(positions.dtype)
        argument = 2 * places / (self.max_positions - 1) - 1
        powers = [torch.ones_like(argument), argument]
        for _ in range(self.options.degree - 1):
            powers.append(2 * argument * powers[-1] - powers[-2])
        values = torch.stack(powers[1:], dim=-1)  # the constant says nothing about the position
        return project(values, self.waves, self.position_size)
