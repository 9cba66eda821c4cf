"""Functions that several schemes share: rotation of feature pairs, sinusoids, distance buckets, projections."""

from __future__ import annotations

import math
import random
from typing import Literal, NamedTuple

import torch

BASE = 10000.0
"""Longest wavelength over 2 pi, as in Vaswani et al. 2017 and most papers since."""


def frequencies(width: int, base: float, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """What a position is divided by for each pair of features; an odd width has half a pair at its end."""
    pairs = torch.arange((width + 1) // 2, device=device, dtype=dtype)
    return base ** (2 * pairs / width)


def sinusoids(positions: torch.Tensor, width: int, base: float, layout: str, dtype: torch.dtype) -> torch.Tensor:
    """(..., width) of sines and cosines; of an odd width, the last cosine is left out."""
    angles = positions.unsqueeze(-1).to(dtype) / frequencies(width, base, positions.device, dtype)
    sines, cosines = angles.sin(), angles[..., : width // 2].cos()
    if layout == "halves":
        return torch.cat([sines, cosines], dim=-1)
    table = angles.new_empty(*positions.shape, width)
    table[..., 0::2], table[..., 1::2] = sines, cosines
    return table


Layout = Literal["halves", "interleaved"]
"""Which features turn together: those half a head apart (LLaMA), or neighbours (GPT-J, RoFormer)."""


def expand_pairs(by_pair: torch.Tensor, layout: str) -> torch.Tensor:
    """One value for each pair of features, as one for each feature."""
    return by_pair.repeat_interleave(2, -1) if layout == "interleaved" else torch.cat([by_pair, by_pair], dim=-1)


class Angles(NamedTuple):
    """Of one forward, for each feature of each token."""

    cosines: torch.Tensor
    sines: torch.Tensor
    turning: torch.Tensor
    """The sines, with the sign that a pair's other feature has in the turn: worked out once, not in every layer."""


def rotation_angles(angles_by_pair: torch.Tensor, layout: str) -> Angles:
    """(..., D): cosines and sines of one angle for each pair."""
    angles = expand_pairs(angles_by_pair, layout)
    cosines, sines = angles.cos(), angles.sin()
    half = sines.shape[-1] // 2
    signs = torch.tensor([-1.0, 1.0], device=sines.device, dtype=sines.dtype)
    signs = signs.repeat(half) if layout == "interleaved" else signs.repeat_interleave(half)
    return Angles(cosines, sines, sines * signs)


def rotate_pairs(states: torch.Tensor, cosines: torch.Tensor, turning: torch.Tensor, layout: str) -> torch.Tensor:
    """Turn the first features of each head, as many as there are angles; leave the rest."""
    size = cosines.shape[-1]
    turned, rest = (states, None) if size == states.shape[-1] else (states[..., :size], states[..., size:])
    if layout == "interleaved":
        others = turned.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    else:
        others = turned.roll(size // 2, -1)
    turned = turned * cosines.to(states.dtype) + others * turning.to(states.dtype)
    return turned if rest is None else torch.cat([turned, rest], dim=-1)


SEED = 0


def sample_frequencies(count: int, width: int, what: str = "count") -> list[int]:
    """Which rows of a cosine transform of the width to use: a seeded shuffle, the same in every release of Python."""
    if count >= width:
        raise ValueError(f"{what} must be below the width {width} that it is projected to, got {count}")
    shuffle = random.Random(SEED)
    return sorted(range(1, width), key=lambda _: shuffle.random())[:count]


def cosine_rows(waves: list[int], width: int, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """(one a wave, width): orthonormal rows, the same on every machine.

    Rows of a cosine transform are orthogonal by formula: there is nothing to keep in a buffer, and no factorisation
    whose rounding depends on the library.
    """
    places = torch.arange(width, device=device, dtype=dtype) + 0.5
    numbers = torch.tensor(waves, device=device, dtype=dtype)
    return torch.cos(torch.pi / width * numbers[:, None] * places) * (2 / width) ** 0.5


def project(values: torch.Tensor, waves: list[int], width: int) -> torch.Tensor:
    """(..., one a wave) to (..., width). Not under autocast, which would make one of neighbouring positions."""
    kind = values.device.type
    with torch.autocast("cpu" if kind == "meta" else kind, enabled=False):
        return values @ cosine_rows(waves, width, values.device, values.dtype)


def tiled_identity(rows: int, width: int) -> torch.Tensor:
    """(rows, width): the identity, begun again where it ends, so that no row is zero."""
    return torch.eye(width).repeat(-(-rows // width), 1)[:rows]


def distance_buckets(distances: torch.Tensor, num_buckets: int, max_distance: int, bidirectional: bool) -> torch.Tensor:
    """Bucket of each distance (key minus query). The logarithm is in float32 and in T5's order: edges depend on it."""
    first: torch.Tensor | int = 0
    if bidirectional:
        num_buckets //= 2
        first = (distances > 0).long() * num_buckets
        distances = distances.abs()
    else:
        distances = -distances.clamp(max=0)
    exact = num_buckets // 2
    widening = torch.log(distances.clamp(min=1).float() / exact) / math.log(max_distance / exact)
    far = exact + (widening * (num_buckets - exact)).long()
    return first + torch.where(distances < exact, distances, far.clamp(max=num_buckets - 1))


def check_buckets(name: str, num_buckets: int, max_distance: int, bidirectional: bool) -> None:
    """Raise ValueError for numbers under which there is no bucket to widen."""
    one_way = num_buckets // 2 if bidirectional else num_buckets
    if one_way < 2:
        raise ValueError(f"{name}: num_buckets must be at least 4 where bidirectional, got {num_buckets}")
    if max_distance <= one_way // 2:
        raise ValueError(
            f"{name}: max_distance must be above {one_way // 2}, where buckets begin to widen "
            f"(num_buckets={num_buckets}), got {max_distance}"
        )


HIERARCHY_WEIGHT = 0.4
"""Share of the coarse row in a hierarchical table (Su 2020)."""


def extended_rows(weight: torch.Tensor, positions: torch.Tensor, how: str, max_positions: int) -> torch.Tensor:
    """Rows for `positions` out of a table with fewer rows, computed from it: its parameters stay as they are."""
    rows = weight.shape[0]
    embedding = torch.nn.functional.embedding
    if how == "tile":
        return embedding(positions % rows, weight)
    if how == "interpolate":
        wide = torch.promote_types(weight.dtype, torch.float32)
        places = positions.to(wide) * ((rows - 1) / max(max_positions - 1, 1))
        low = places.floor().long()
        share = (places - low).unsqueeze(-1).to(weight.dtype)
        return embedding(low, weight) * (1 - share) + embedding((low + 1).clamp(max=rows - 1), weight) * share
    a = HIERARCHY_WEIGHT
    base = (weight - a * weight[:1]) / (1 - a)
    extended = a * embedding(positions // rows, base) + (1 - a) * embedding(positions % rows, base)
    # The first rows are the checkpoint's own, to the bit: rounding would otherwise move them.
    own = (positions < rows).unsqueeze(-1)
    return torch.where(own, embedding(positions.clamp(max=rows - 1), weight), extended)
