"""Exponential position embeddings: decaying exponentials at geometric rates, projected to the hidden size."""

import torch

from . import InputScheme, MixOptions, ModelShape, Positions, option
from .functional import project, sample_dct_rows


class ExponentialOptions(MixOptions):
    rates: int = option(8, "number of rates, from decay over max_positions to decay over one position", minimum=1)
    max_positions: int | None = option(None, "where the slowest rate reaches 1/e; None: the model's length", minimum=2)


class Exponential(InputScheme[ExponentialOptions]):
    """exp(-rate * position / max_positions) at several rates, each along its own direction of the embedding."""

    name = "exponential"
    paper = "no single paper: a fixed function of the position, like sinusoids (Vaswani et al. 2017)"
    formula = "x_i + sum_k exp(-n^(k / (rates - 1)) i / n) w_k, w_k orthonormal"
    cost = "no parameters; one table per forward pass"
    extends = True
    Options = ExponentialOptions

    def __init__(self, options: ExponentialOptions, shape: ModelShape) -> None:
        super().__init__(options, shape)
        self.max_positions = options.max_positions or max(shape.max_positions, 2)
        self.dct_rows = sample_dct_rows(options.rates, self.position_size, "exponential: rates")

    def position_embeddings(self, positions: Positions) -> torch.Tensor:
        relative = positions.queries_BQ.clamp(min=0).to(positions.dtype).unsqueeze(-1) / self.max_positions
        steps = torch.arange(self.options.rates, device=relative.device, dtype=relative.dtype)
        rates = self.max_positions ** (steps / max(self.options.rates - 1, 1))
        return project(torch.exp(-rates * relative), self.dct_rows, self.position_size)
