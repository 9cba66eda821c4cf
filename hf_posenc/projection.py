"""Fixed matrices: one that takes a few functions of the position to the width of a model, one to start from."""

from __future__ import annotations

import random

import torch

SEED = 0


def pick_waves(count: int, width: int, what: str = "count") -> list[int]:
    """Which rows of a cosine transform of the width to use: a seeded shuffle, the same in every release of Python."""
    if count >= width:
        raise ValueError(f"{what} must be below the width {width} that it is projected to, got {count}")
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


def projected(values: torch.Tensor, waves: list[int], width: int) -> torch.Tensor:
    """(..., one a wave) to (..., width). Not under autocast, which would make one of neighbouring positions."""
    kind = values.device.type
    with torch.autocast("cpu" if kind == "meta" else kind, enabled=False):
        return values @ orthogonal_rows(waves, width, values.device, values.dtype)


def repeated_identity(rows: int, width: int) -> torch.Tensor:
    """(rows, width): the identity, begun again where it ends, so that no row is zero."""
    return torch.eye(width).repeat(-(-rows // width), 1)[:rows]
