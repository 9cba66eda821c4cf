"""Functions shared by schemes: rotation, sinusoids, fixed projections, distance buckets, extended tables."""

from __future__ import annotations

import math
import random
from typing import Literal, NamedTuple

import torch

from ..errors import PosEncError

BASE = 10000.0
"""Base of the geometric wavelengths in Vaswani et al. 2017 and most papers since."""
SEED = 0
HIERARCHY_WEIGHT = 0.4
"""Weight of the coarse row in a hierarchically extended table (Su 2020)."""
Layout = Literal["halves", "interleaved"]
"""Which features form a pair: those half a head apart (LLaMA), or neighbors (GPT-J, RoFormer)."""


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


def broadcast_heads(values_H: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """One value per head, shaped and cast to multiply a tensor that has no head dimension yet."""
    return values_H.to(target).view(-1, *[1] * target.dim())


def expand_pairs(by_pair: torch.Tensor, layout: str) -> torch.Tensor:
    """Repeat one value per pair of features so that each feature has it."""
    return by_pair.repeat_interleave(2, -1) if layout == "interleaved" else torch.cat([by_pair, by_pair], dim=-1)


class Rotation(NamedTuple):
    """Rotary angles of one forward pass, (B, 1, Q, D). Starts with cos and sin: see `Scheme.uses_rotate_half`."""

    cos: torch.Tensor
    sin: torch.Tensor
    signed_sin: torch.Tensor
    """The sines with the sign of the other feature of a pair, computed once instead of in every layer."""


def rotation(angles_by_pair: torch.Tensor, layout: str) -> Rotation:
    """Build the rotation by one angle per pair of features."""
    angles = expand_pairs(angles_by_pair, layout)
    cos, sin = angles.cos(), angles.sin()
    half = sin.shape[-1] // 2
    signs = torch.tensor([-1.0, 1.0], device=sin.device, dtype=sin.dtype)
    signs = signs.repeat(half) if layout == "interleaved" else signs.repeat_interleave(half)
    return Rotation(cos, sin, sin * signs)


def rotate_pairs(states: torch.Tensor, cos: torch.Tensor, signed_sin: torch.Tensor, layout: str) -> torch.Tensor:
    """Rotate the first features of each head, as many as there are angles, and leave the rest."""
    size = cos.shape[-1]
    rotated, rest = (states, None) if size == states.shape[-1] else (states[..., :size], states[..., size:])
    if layout == "interleaved":
        partners = rotated.view(*rotated.shape[:-1], -1, 2).flip(-1).flatten(-2)
    else:
        partners = rotated.roll(size // 2, -1)
    rotated = rotated * cos.to(states.dtype) + partners * signed_sin.to(states.dtype)
    return rotated if rest is None else torch.cat([rotated, rest], dim=-1)


def sample_dct_rows(count: int, width: int, option: str = "count") -> list[int]:
    """Choose rows of a discrete cosine transform by a seeded shuffle that is the same in every Python release."""
    if count >= width:
        raise PosEncError(f"{option} must be below {width}, the width it is projected to, got {count}")
    shuffle = random.Random(SEED)
    return sorted(range(1, width), key=lambda _: shuffle.random())[:count]


def dct_rows(rows: list[int], width: int, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """Orthonormal rows, (rows, width), given by a formula: no buffer to store, no platform-dependent factorization."""
    features = torch.arange(width, device=device, dtype=dtype) + 0.5
    frequencies = torch.tensor(rows, device=device, dtype=dtype)
    scale: float = (2 / width) ** 0.5
    return torch.cos(torch.pi / width * frequencies[:, None] * features) * scale


def project(values: torch.Tensor, rows: list[int], width: int) -> torch.Tensor:
    """Project (..., rows) to (..., width). Without autocast, which would merge neighboring positions."""
    device = values.device.type
    with torch.autocast("cpu" if device == "meta" else device, enabled=False):
        return values @ dct_rows(rows, width, values.device, values.dtype)


def tiled_identity(rows: int, width: int) -> torch.Tensor:
    """The identity matrix, repeated or cut to (rows, width), so that no row is zero."""
    return torch.eye(width).repeat(-(-rows // width), 1)[:rows]


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


def extended_rows(weight: torch.Tensor, positions: torch.Tensor, extend: str, max_positions: int) -> torch.Tensor:
    """Compute the rows of a longer position table from a shorter one.

    Args:
        weight: The short table, (rows, width).
        positions: The positions to look up, of any shape.
        extend: "interpolate", "tile" or "hierarchical".
        max_positions: The length of the longer table.

    Returns:
        One row per position, (..., width).
    """
    rows = weight.shape[0]
    embedding = torch.nn.functional.embedding
    if extend == "tile":
        return embedding(positions % rows, weight)
    if extend == "interpolate":
        wide = positions.to(torch.promote_types(weight.dtype, torch.float32))
        scaled = wide * ((rows - 1) / max(max_positions - 1, 1))
        low = scaled.floor().long()
        fraction = (scaled - low).unsqueeze(-1).to(weight.dtype)
        return embedding(low, weight) * (1 - fraction) + embedding((low + 1).clamp(max=rows - 1), weight) * fraction
    a = HIERARCHY_WEIGHT
    base = (weight - a * weight[:1]) / (1 - a)
    extended = a * embedding(positions // rows, base) + (1 - a) * embedding(positions % rows, base)
    # The first rows are taken from the table itself: rounding would otherwise change them.
    is_stored = (positions < rows).unsqueeze(-1)
    return torch.where(is_stored, embedding(positions.clamp(max=rows - 1), weight), extended)
