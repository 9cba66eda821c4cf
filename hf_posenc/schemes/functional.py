"""Functions that several schemes share: sinusoids, initializers, buckets of distances."""

from __future__ import annotations

import functools
import math

import torch
from transformers import initialization as init

from ..errors import PosEncError
from .base import Initializer

BASE = 10000.0
"""Base of the geometric wavelengths in Vaswani et al. 2017 and most papers since."""


def timescales(width: int, base: float, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """base^(2k / width) for each pair k of features; positions are divided by it. Odd widths end in half a pair."""
    pairs = torch.arange((width + 1) // 2, device=device, dtype=dtype)
    return base ** (2 * pairs / width)


def sinusoids(positions: torch.Tensor, width: int, base: float, layout: str, dtype: torch.dtype) -> torch.Tensor:
    """Sines and cosines of the positions, (..., width). Odd widths leave out the last cosine."""
    angles = positions.unsqueeze(-1).to(dtype) / timescales(width, base, positions.device, dtype)
    sin, cos = angles.sin(), angles[..., : width // 2].cos()
    if layout == "halves":
        return torch.cat([sin, cos], dim=-1)
    table = angles.new_empty(*positions.shape, width)
    table[..., 0::2], table[..., 1::2] = sin, cos
    return table


def paper_or_neutral(start: str, std: float, neutral: Initializer = init.zeros_) -> Initializer:
    """The initializer for `init="paper"`, a normal distribution, or for `init="neutral"`."""
    return functools.partial(init.normal_, std=std) if start == "paper" else neutral


def init_sinusoids(table: torch.Tensor, first_position: int = 0) -> None:
    """Fill a table with rows that differ, so that the zero parameters they are multiplied with can learn."""
    rows = torch.arange(first_position, first_position + len(table))
    init.copy_(table, sinusoids(rows, table.shape[1], BASE, "halves", torch.float32))


def init_tiled_identity(weight: torch.Tensor) -> None:
    """Fill a projection with the identity matrix, repeated or cut so that no row is zero."""
    rows, width = weight.shape
    init.copy_(weight, torch.eye(width).repeat(-(-rows // width), 1)[:rows])


def distance_buckets(distances: torch.Tensor, num_buckets: int, max_distance: int, bidirectional: bool) -> torch.Tensor:
    """T5's bucket of each distance (key minus query). Float32 logs in T5's order, which the bucket edges depend on."""
    first: torch.Tensor | int = 0
    if bidirectional:
        num_buckets //= 2
        first = (distances > 0).long() * num_buckets
        distances = distances.abs()
    else:
        distances = -distances.clamp(max=0)
    exact = num_buckets // 2
    log_ratio = torch.log(distances.clamp(min=1).float() / exact) / math.log(max_distance / exact)
    far = exact + (log_ratio * (num_buckets - exact)).long()
    return first + torch.where(distances < exact, distances, far.clamp(max=num_buckets - 1))


def bucket_bias(weight: torch.Tensor, buckets: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Look up a bias per head, (H, ...), in a (buckets, H) table."""
    return torch.nn.functional.embedding(buckets, weight.to(dtype)).movedim(-1, 0)


def check_buckets(scheme: str, num_buckets: int, max_distance: int, bidirectional: bool) -> None:
    """Raise PosEncError if there are too few buckets, or no distance left for the logarithmic ones."""
    per_side = num_buckets // 2 if bidirectional else num_buckets
    if per_side < 2:
        raise PosEncError(f"{scheme}: num_buckets must be at least 4 if bidirectional, got {num_buckets}")
    if max_distance <= per_side // 2:
        raise PosEncError(f"{scheme}: max_distance must be above {per_side // 2} for {num_buckets} num_buckets")
