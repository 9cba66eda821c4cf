"""Turning pairs of features by an angle, which is what all rotary schemes do."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch

Layout = Literal["halves", "interleaved"]
"""Which features turn together: those half a head apart (LLaMA), or neighbours (GPT-J, RoFormer)."""


def laid_out(by_pair: torch.Tensor, layout: str) -> torch.Tensor:
    """One value for each pair of features, as one for each feature."""
    return by_pair.repeat_interleave(2, -1) if layout == "interleaved" else torch.cat([by_pair, by_pair], dim=-1)


class Angles(NamedTuple):
    """Of one forward, for each feature of each token."""

    cosines: torch.Tensor
    sines: torch.Tensor
    turning: torch.Tensor
    """The sines, with the sign that a pair's other feature has in the turn: worked out once, not in every layer."""


def angles_of(angles_by_pair: torch.Tensor, layout: str) -> Angles:
    """(..., D): cosines and sines of one angle for each pair."""
    angles = laid_out(angles_by_pair, layout)
    cosines, sines = angles.cos(), angles.sin()
    half = sines.shape[-1] // 2
    signs = torch.tensor([-1.0, 1.0], device=sines.device, dtype=sines.dtype)
    signs = signs.repeat(half) if layout == "interleaved" else signs.repeat_interleave(half)
    return Angles(cosines, sines, sines * signs)


def turn(states: torch.Tensor, cosines: torch.Tensor, turning: torch.Tensor, layout: str) -> torch.Tensor:
    """Turn the first features of each head, as many as there are angles; leave the rest."""
    size = cosines.shape[-1]
    turned, rest = (states, None) if size == states.shape[-1] else (states[..., :size], states[..., size:])
    if layout == "interleaved":
        others = turned.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    else:
        others = turned.roll(size // 2, -1)
    turned = turned * cosines.to(states.dtype) + others * turning.to(states.dtype)
    return turned if rest is None else torch.cat([turned, rest], dim=-1)
