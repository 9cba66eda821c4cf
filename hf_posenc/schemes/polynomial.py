"""Polynomial position embeddings: Chebyshev polynomials of the position, projected to the hidden size."""

import torch

from . import InputScheme, MixOptions, ModelShape, Positions, option
from .functional import project, sample_dct_rows


class PolynomialOptions(MixOptions):
    degree: int = option(3, "the highest degree", minimum=1)
    max_positions: int | None = option(None, "the end of the polynomials' domain; None: the model's length", minimum=2)


class Polynomial(InputScheme[PolynomialOptions]):
    """Chebyshev polynomials of the position, each along its own direction of the embedding.

    The argument runs from -1 to 1 over `max_positions` and stays at 1 beyond, so that embeddings are bounded.
    """

    name = "polynomial"
    paper = "no single paper: a fixed function of the position, like sinusoids (Vaswani et al. 2017)"
    formula = "x_i + sum_k T_k(t_i) w_k, t_i = 2 min(i, n - 1) / (n - 1) - 1, T_k Chebyshev, w_k orthonormal"
    cost = "no parameters; one table per forward pass"
    extends = True
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
        return project(values, self.dct_rows, self.position_size)
