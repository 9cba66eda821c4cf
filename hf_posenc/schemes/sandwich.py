"""Sandwich (Chi et al. 2023): the inner product of sinusoidal embeddings as a distance bias."""

import torch

from . import Content, DistanceBias, Kind, LayerParams, Options, Positions, Scheme
from .functional import BASE, broadcast_heads

WIDTH = 128
"""Width of the sinusoidal embeddings, as in the paper, whatever the model's hidden size."""


class Sandwich(Scheme[Options, torch.Tensor]):
    """The inner product of two sinusoidal embeddings, scaled down more in each further head. No parameters."""

    name = "sandwich"
    paper = "Chi et al. 2023, https://arxiv.org/abs/2212.10356"
    kind = Kind.DISTANCE
    formula = "q.k / sqrt(d) + (sum_k cos(r / 10000^(k/64)) - 64) / (8 h / H)"
    cost = "no parameters; one bias vector per head"
    extends = True

    def prepare(self, positions: Positions) -> torch.Tensor:
        pairs, heads = WIDTH // 2, self.shape.num_heads
        distances = positions.distances.to(positions.dtype)
        product = torch.zeros_like(distances)
        for pair in range(1, pairs + 1):  # one wavelength at a time, to save memory
            product = product + torch.cos(distances * BASE ** (-2 * pair / WIDTH))
        compression = torch.arange(1, heads + 1, device=distances.device, dtype=distances.dtype) * 8 / heads
        return (product - pairs) / broadcast_heads(compression, product)

    def score(self, prepared: torch.Tensor, layer_params: LayerParams, content: Content) -> DistanceBias:
        return DistanceBias(prepared)
