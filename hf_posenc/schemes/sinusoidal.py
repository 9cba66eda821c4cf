"""Sines and cosines of the position at geometrically spaced wavelengths, added to the word embeddings."""

from __future__ import annotations

import dataclasses
from typing import Literal

import torch

from ..options import Options, option
from ..scheme import Positions, Scheme


@dataclasses.dataclass(frozen=True, kw_only=True)
class SinusoidalOptions(Options):
    mix: Literal["add"] = option("add", "how words and positions are put together")
    base: float = option(
        10000.0,
        "longest wavelength over 2 pi",
        lambda base: None if base > 1 else "must be above 1",
    )
    layout: Literal["interleaved", "halves"] = option(
        "interleaved", "sine at even and cosine at odd features, or all sines first"
    )


def sinusoids(positions: torch.Tensor, width: int, base: float, layout: str, dtype: torch.dtype) -> torch.Tensor:
    """(..., width) of sines and cosines; of an odd width, the last cosine is left out."""
    pairs = torch.arange((width + 1) // 2, device=positions.device, dtype=dtype)
    angles = positions.unsqueeze(-1).to(dtype) / base ** (2 * pairs / width)
    sines, cosines = angles.sin(), angles[..., : width // 2].cos()
    if layout == "halves":
        return torch.cat([sines, cosines], dim=-1)
    table = angles.new_empty(*positions.shape, width)
    table[..., 0::2], table[..., 1::2] = sines, cosines
    return table


class Sinusoidal(Scheme):
    """Fixed sines and cosines of the position, added to the word embeddings."""

    name = "sinusoidal"
    paper = "Vaswani et al. 2017, https://arxiv.org/abs/1706.03762"
    extends = True
    at_input = True
    Options = SinusoidalOptions
    options: SinusoidalOptions

    def embed(self, words_BQE: torch.Tensor, positions: Positions) -> torch.Tensor:
        table = sinusoids(
            positions.queries_BQ, words_BQE.shape[-1], self.options.base, self.options.layout, positions.dtype
        )
        return words_BQE + table.to(words_BQE.dtype)
