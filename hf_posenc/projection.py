"""A fixed orthogonal matrix that takes a few functions of the position to the width of a model."""

from __future__ import annotations

import random

import torch

SEED = 0


def pick_waves(count: int, width: int) -> list[int]:
    """Which rows of a cosine transform of the width to use: a seeded shuffle, the same in every release of Python."""
    shuffle = random.Random(SEED)
    return sorted(range(1, width), key=lambda _: shuffle.random())[:count]


def orthogonal_rows(waves: list[int], width: int, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """(one a wave, width): orthonormal rows, the same on every machine.

    Rows of a cosine transform are orthogonal by formula: there is nothing to keep in a buffer, and no factorisation
    whose rounding depends on the library.
    """
    places = torch.arange(width, device=device, dtype=dtype) + 0.5
    numbers = torch.tensor(waves, device=device, dtype=dtype)
    return torch.cos(torch.pi / width * numbers[:, None] * places) * (2 / width) ** 0.5
