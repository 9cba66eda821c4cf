"""Rotations of pairs of features: their angles, and the rotation of states by them.

Shape legend: B batch, H heads, Q queries, K keys, D head size.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from .base import StockRotate


class FarRotation(NamedTuple):
    """How much further queries and keys are rotated where they are far apart (see `remapping`)."""

    starts_BQ: tuple[torch.Tensor, ...]
    keys_BK: torch.Tensor
    """The positions of the keys."""
    query_offsets_BQ: tuple[torch.Tensor, ...]
    key_offsets_BK: torch.Tensor


class Rotation(NamedTuple):
    """Rotary angles of one forward pass, (B, 1, Q, D). Starts with cos and sin: see `Scheme.uses_rotate_half`."""

    cos: torch.Tensor
    sin: torch.Tensor
    signed_sin: torch.Tensor
    """The sines with the sign of the other feature of a pair, computed once instead of in every layer."""
    far: FarRotation | None = None
    further: tuple[Rotation, ...] = ()
    """The rotations by the offsets of `far`: those of the queries, then that of the keys."""


class StockRotation(NamedTuple):
    """A rotation that is left to the architecture's own code."""

    rotate: StockRotate
    far: FarRotation | None


def join_pairs(first: torch.Tensor, second: torch.Tensor, layout: str) -> torch.Tensor:
    """Put the two values of each pair of features where the layout has these features."""
    if layout == "interleaved":
        return torch.stack([first, second], dim=-1).flatten(-2)
    return torch.cat([first, second], dim=-1)


def rotation(angles: torch.Tensor, layout: str) -> Rotation:
    """Build the rotation by one angle per pair of features."""
    return join_rotation(angles.cos(), angles.sin(), layout)


def join_rotation(cos: torch.Tensor, sin: torch.Tensor, layout: str) -> Rotation:
    """Build the rotation from the cosine and sine of each pair of features."""
    return Rotation(join_pairs(cos, cos, layout), join_pairs(sin, sin, layout), join_pairs(-sin, sin, layout))


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


def rotate_further(states: torch.Tensor, rotation: Rotation, layout: str) -> torch.Tensor:
    """Rotate states, perhaps only the first ones, that are rotated already; in float32 or wider."""
    wide = states.to(torch.promote_types(states.dtype, torch.float32))
    cos, signed_sin = (angles[:, :, : states.shape[2]] for angles in (rotation.cos, rotation.signed_sin))
    return rotate_pairs(wide, cos, signed_sin, layout).to(states.dtype)
