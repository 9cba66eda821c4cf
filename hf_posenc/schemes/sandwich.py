"""The product of two sinusoidal embeddings as a bias: it falls with distance, faster in some heads than others."""

from __future__ import annotations

import torch

from .base import Kind, LayerParams, Scheme
from .inputs import Content, Positions
from .terms import DistanceBias

WIDTH, BASE = 128, 10000.0
"""Features and base of the sinusoids whose product it is, as in the paper whatever the model's width."""


class Sandwich(Scheme):
    """The product of sinusoids by distance, compressed more in every further head. No parameters."""

    name = "sandwich"
    paper = "Chi et al. 2023, https://arxiv.org/abs/2212.10356"
    kind = Kind.DISTANCE
    formula = "q.k / sqrt(d) + (sum_k cos(r / 10000^(k/64)) - 64) / (8 h / H)"
    cost = "no parameters; one vector a head"
    neutral = "no parameters"
    extends = True

    def prepare(self, positions: Positions) -> torch.Tensor:
        pairs, heads = WIDTH // 2, self.shape.num_heads
        device, dtype = positions.distances.device, positions.dtype
        product = torch.zeros(positions.distances.shape, device=device, dtype=dtype)
        for pair in range(1, pairs + 1):  # one wavelength at a time: all at once would be an axis more
            product = product + torch.cos(positions.distances.to(dtype) * BASE ** (-2 * pair / WIDTH))
        compression = torch.arange(1, heads + 1, device=device, dtype=dtype) * 8 / heads
        return (product - pairs) / compression.view(-1, *[1] * product.dim())

    def score(self, prepared: torch.Tensor, part: LayerParams | None, content: Content) -> DistanceBias:
        return DistanceBias(prepared)
