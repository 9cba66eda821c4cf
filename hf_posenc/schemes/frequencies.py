"""Changes to the frequencies of a rotation: p-RoPE, Resonance RoPE (Wang et al. 2024) and FoPE (Hua et al. 2024).

Frequencies are angles per token, one for each pair of features, highest first. Zero means no rotation.

Shape legend: F frequencies.
"""

from __future__ import annotations

import math
import random

import torch

from ..errors import PosEncError
from .constants import computed_constant

SEED = 0


def keep_highest(frequencies_F: torch.Tensor, fraction: float) -> torch.Tensor:
    """Set all but the highest frequencies to zero. Raises PosEncError if the fraction is too small to keep any."""
    kept = int(fraction * len(frequencies_F) + 1e-9)  # 0.29 * 100 is 28.99...
    if not kept:
        raise PosEncError(
            f"rope: frequency_fraction {fraction} keeps none of the {len(frequencies_F)} frequencies; raise it, or use "
            "none"
        )
    is_kept = torch.arange(len(frequencies_F), device=frequencies_F.device) < kept
    return torch.where(is_kept, frequencies_F, 0.0)


def round_wavelengths(frequencies_F: torch.Tensor) -> torch.Tensor:
    """Change frequencies so that each wavelength is a whole number of tokens, and angles repeat exactly.

    Wavelengths below two tokens become two: at one, every position would have the same angle.
    """
    wavelengths_F = (2 * math.pi / frequencies_F).round().clamp(min=2)
    return torch.where(frequencies_F == 0, 0.0, 2 * math.pi / wavelengths_F)


def drop_incomplete(frequencies_F: torch.Tensor, length: int) -> torch.Tensor:
    """Set frequencies that complete no turn within a length to zero: they are trained on a part of it only."""
    return torch.where(frequencies_F < 2 * math.pi / length, 0.0, frequencies_F)


def mix_frequencies(
    cos: torch.Tensor, sin: torch.Tensor, frequencies_F: torch.Tensor, gain: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add a weighted sum of the cosines of all frequencies to each cosine, and of the sines to each sine.

    Args:
        cos: Cosines, (..., F).
        sin: Sines, (..., F).
        frequencies_F: The frequencies. Those that are zero take no part.
        gain: The weights have a normal distribution, with this standard deviation over the root of the number of
            frequencies (Glorot's).

    Returns:
        The new cosines and sines.
    """
    used = frequencies_F != 0
    scale = gain / used.sum().clamp(min=1).sqrt() * used * used[:, None]
    cos_weights, sin_weights = scale * computed_constant(_normal_numbers, len(used), cos.device, cos.dtype)
    return cos + cos @ cos_weights, sin + sin @ sin_weights


def _normal_numbers(size: int) -> list[list[list[float]]]:
    """Two square matrices of normal numbers, which are the same in every release of Python and PyTorch."""
    source = random.Random(SEED)
    radii = [math.sqrt(-2 * math.log(1 - source.random())) for _ in range(size * size)]
    angles = [2 * math.pi * source.random() for _ in range(size * size)]
    pairs = list(zip(radii, angles, strict=True))
    rows = [pairs[start : start + size] for start in range(0, size * size, size)]
    return [[[r * function(a) for r, a in row] for row in rows] for function in (math.cos, math.sin)]
