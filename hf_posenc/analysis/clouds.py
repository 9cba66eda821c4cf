"""Do the positions of one word form a small cloud around it? Spread within words against distance between them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import nn

from .subjects import names_of, positioned
from .subspaces import projected_to_plane
from .vectors import input_states


@dataclasses.dataclass(frozen=True)
class Clouds:
    """Some words, each at every position."""

    name: str
    tokens: tuple[int, ...]
    labels: tuple[str, ...]
    within: torch.Tensor
    """(T,): how far a word's vectors are from their centre: the root of the mean square."""
    nearest: torch.Tensor
    """(T,): from a word's centre to the nearest other one."""
    between: float
    """Mean distance between centres."""
    own: float
    """Share of vectors that are nearer to the centre of their word than to any other."""
    plane: torch.Tensor
    """(T, N, 2): along the two directions in which all of them differ most."""
    shown: float
    """Share of the variance in that plane."""

    @property
    def ratio(self) -> float:
        """Spread within a word over the distance to the nearest other one, averaged: small clouds have it below one."""
        return (self.within / self.nearest.clamp(min=1e-30)).mean().item()

    def __str__(self) -> str:
        return (
            f"{self.name}: {len(self.tokens)} words at {self.plane.shape[1]} positions; spread within a word "
            f"{self.within.mean():.3g}, to the nearest other word {self.nearest.mean():.3g}, between words "
            f"{self.between:.3g}: {self.ratio:.2f} of the way to the neighbour; {self.own:.1%} nearest to their word"
        )


def clouds(
    model: nn.Module,
    tokens: Sequence[int] | int = 128,
    *,
    length: int = 64,
    labels: Sequence[str] | None = None,
    seed: int = 0,
) -> Clouds:
    """Put each of some words (these ids, or so many at random) at every position, as the model's input does."""
    with positioned(model) as base:
        vocabulary = base.get_input_embeddings().weight.shape[0]
        if isinstance(tokens, int):
            generator = torch.Generator().manual_seed(seed)
            ids = torch.randperm(vocabulary, generator=generator)[:tokens]
        else:
            ids = torch.tensor(list(tokens))
        if len(ids) < 2 or ids.min() < 0 or ids.max() >= vocabulary:
            raise ValueError(f"name at least 2 tokens, from 0 to {vocabulary - 1}")
        if labels is not None and len(labels) != len(ids):
            raise ValueError(f"there are {len(ids)} tokens and {len(labels)} labels")
        states_TNE = input_states(base, ids[:, None].expand(-1, length).contiguous()).double()
        name = names_of(base)
    centres = states_TNE.mean(1)
    apart = torch.cdist(centres, centres)
    others = apart + torch.diag(torch.full((len(ids),), float("inf"), dtype=torch.float64))
    to_centres_TNT = torch.cdist(states_TNE.flatten(0, 1), centres).unflatten(0, states_TNE.shape[:2])
    own = to_centres_TNT.argmin(-1) == torch.arange(len(ids))[:, None]
    plane, shown = projected_to_plane(states_TNE.flatten(0, 1))
    return Clouds(
        name=name,
        tokens=tuple(ids.tolist()),
        labels=tuple(labels) if labels is not None else tuple(f"token {token}" for token in ids.tolist()),
        within=(states_TNE - centres[:, None]).square().sum(-1).mean(-1).sqrt(),
        nearest=others.amin(-1),
        between=(apart.sum() / (len(ids) * (len(ids) - 1))).item(),
        own=own.double().mean().item(),
        plane=plane.unflatten(0, states_TNE.shape[:2]),
        shown=shown,
    )
