"""Sines and cosines of positions or distances, at geometrically spaced wavelengths."""

from __future__ import annotations

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
