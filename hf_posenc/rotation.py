"""Turning pairs of features by an angle, which is what all rotary schemes do."""

from __future__ import annotations

from typing import Literal

import torch

Layout = Literal["halves", "interleaved"]
"""Which features turn together: those half a head apart (LLaMA), or neighbours (GPT-J, RoFormer)."""


def laid_out(by_pair: torch.Tensor, layout: str) -> torch.Tensor:
    """One value for each pair of features, as one for each feature."""
    return by_pair.repeat_interleave(2, -1) if layout == "interleaved" else torch.cat([by_pair, by_pair], dim=-1)


def turn(states: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor, layout: str) -> torch.Tensor:
    """Turn the first features of each head, as many as there are angles; leave the rest."""
    size = cosines.shape[-1]
    turned, rest = states[..., :size], states[..., size:]
    quarter = _quarter_turn_neighbours if layout == "interleaved" else _quarter_turn_halves
    turned = turned * cosines.to(states.dtype) + quarter(turned) * sines.to(states.dtype)
    return torch.cat([turned, rest], dim=-1) if rest.shape[-1] else turned


def _quarter_turn_halves(states: torch.Tensor) -> torch.Tensor:
    first, second = states.chunk(2, dim=-1)
    return torch.cat([-second, first], dim=-1)


def _quarter_turn_neighbours(states: torch.Tensor) -> torch.Tensor:
    pairs = states.unflatten(-1, (-1, 2))
    return torch.stack([-pairs[..., 1], pairs[..., 0]], dim=-1).flatten(-2)
