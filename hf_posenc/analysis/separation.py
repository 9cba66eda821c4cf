"""Can word and position be told apart once they are mixed? Probes, dimensions and angles.

A probe for the position is fitted on some words and tried on others; one for the word is fitted at some positions and
tried at others. So what is found is the position whatever the word, and the word wherever it stands.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from ..schemes.mixing import InputScheme
from .probes import Probe, linear_probe
from .subjects import names_of, positioned
from .subspaces import effective_dimension, leading_directions, principal_angles, random_angles
from .vectors import input_states, position_vectors

SIDE_BY_SIDE = "side by side"
NOTHING = 1e-9
"""The variance of positions, as a share of the words', below which it is rounding."""


@dataclasses.dataclass(frozen=True)
class Separation:
    """One way to mix words and positions."""

    name: str
    mix: str
    width: int
    """Of the vectors that the probes see."""
    position: Probe
    token: Probe
    word_dimension: float
    """How many directions the words fill: a participation ratio."""
    position_dimension: float
    mixed_dimension: float
    angles: torch.Tensor
    """(k,): in degrees, between the directions that hold most of the variance of words and of positions, as mixed."""
    random_angles: torch.Tensor
    """(k,): the same between random subspaces of these dimensions and this width."""

    def __str__(self) -> str:
        position, token = self.position, self.token
        return (
            f"{self.name}, {self.mix} ({self.width} wide): position read right for {position.accuracy:.1%} of unseen "
            f"words, {position.error:.1f} off on average (chance {position.chance:.1%}); word read right for "
            f"{token.accuracy:.1%} at unseen positions (chance {token.chance:.1%}); words fill "
            f"{self.word_dimension:.1f} directions, positions {self.position_dimension:.1f}, both "
            f"{self.mixed_dimension:.1f}; smallest angle {_smallest(self.angles)} "
            f"(unrelated: {_smallest(self.random_angles)})"
        )


def _smallest(angles: torch.Tensor) -> str:
    return f"{angles[0]:.0f} degrees" if len(angles) else "none"


@torch.no_grad()
def separation(
    model: nn.Module,
    *,
    length: int = 64,
    words: int = 128,
    rows: int = 256,
    seed: int = 0,
    vocabulary: Sequence[int] | None = None,
    side_by_side: bool = False,
) -> Separation:
    """Mix random words and positions as the model does at its input, and see what can be read off.

    The position is asked of rows of any words of the model (or of a `vocabulary`: these ids), the word of rows of
    `words` of them. `side_by_side` looks at [word; position] before anything mixes them: what could be read at best.
    With fewer words than some four times the width, the probe for the position learns these words by heart, and what
    it reads of others is less than there is.
    """
    with positioned(model) as base:
        table = base.get_input_embeddings().weight
        known = torch.arange(len(table)) if vocabulary is None else torch.tensor(list(vocabulary))
        words = min(words, len(known))
        if words < 4 or length < 4:
            raise ValueError(f"there must be at least 4 words and 4 positions, got {words} and {length}")
        generator = torch.Generator().manual_seed(seed)
        any_words = known[torch.randint(len(known), (rows, length), generator=generator)]
        chosen = known[torch.randperm(len(known), generator=generator)[:words]]
        labels = torch.randint(words, (rows, length), generator=generator)
        known_words = torch.rand(len(table), generator=generator) < 0.5
        known_places = torch.randperm(length, generator=generator) % 2 == 0
        word_vectors, positions = table.float().cpu(), position_vectors(base, length)

        def states(ids: torch.Tensor) -> torch.Tensor:
            if side_by_side:
                return torch.cat([word_vectors[ids], positions.expand(len(ids), -1, -1)], dim=-1)
            return input_states(base, ids)

        mixed, places = states(any_words), torch.arange(length).expand(rows, -1)
        position = _probe(mixed, places, known_words[any_words], length, seed)
        token = _probe(states(chosen[labels]), labels, known_places.expand(rows, -1), words, seed)
        each_TNE = states(chosen[:, None].expand(-1, length).contiguous())
        name, mix = names_of(base), SIDE_BY_SIDE if side_by_side else mix_of(base)
    # What a word has in common wherever it stands, and a position whatever the word: of a sum, the two that were added.
    of_words, of_positions = each_TNE.mean(1), each_TNE.mean(0)
    if of_positions.var(0).sum() < NOTHING * of_words.var(0).sum():
        of_positions = torch.zeros_like(of_positions)
    angles, unrelated = _angles(of_words, of_positions, seed)
    return Separation(
        name=name,
        mix=mix,
        width=mixed.shape[-1],
        position=position,
        token=token,
        word_dimension=effective_dimension(of_words),
        position_dimension=effective_dimension(of_positions),
        mixed_dimension=effective_dimension(mixed.flatten(0, 1)),
        angles=angles,
        random_angles=unrelated,
    )


def mix_of(base: Any) -> str:
    """How the first scheme at the input mixes words and positions; "none" where there is no such scheme."""
    return next((scheme.options.mix for scheme in base.position_scheme if isinstance(scheme, InputScheme)), "none")


def _probe(states_BNE: torch.Tensor, labels_BN: torch.Tensor, known_BN: torch.Tensor, classes: int, seed: int) -> Probe:
    return linear_probe(states_BNE.flatten(0, 1), labels_BN.flatten(), known_BN.flatten(), classes=classes, seed=seed)


def _angles(words: torch.Tensor, positions: torch.Tensor, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Between the two, and between random subspaces like them; none where there is nothing to compare."""
    if not (words.var(0).sum() > 0 and positions.var(0).sum() > 0):
        return torch.zeros(0), torch.zeros(0)
    first, second = leading_directions(words), leading_directions(positions)
    return principal_angles(first, second), random_angles(len(first), first.shape[1], second.shape[1], seed)
