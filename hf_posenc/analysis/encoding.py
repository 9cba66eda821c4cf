"""The encoding itself: the vector that each position has at the input embedding."""

from __future__ import annotations

import dataclasses

import torch
from torch import nn

from .subjects import names_of, positioned, positions_of, schemes_with
from .vectors import vectors_of

ELSEWHERE = "it gives positions no vector of their own; look at its bias, its rows or its decay instead"


@dataclasses.dataclass(frozen=True)
class Encoding:
    """A vector for each position, before it is mixed with the word's."""

    name: str
    table: torch.Tensor
    """(positions, features)."""

    def __str__(self) -> str:
        positions, features = self.table.shape
        lengths = self.table.norm(dim=-1)
        return (
            f"{self.name}: {positions} positions x {features} features, from {self.table.min():.3g} to "
            f"{self.table.max():.3g}; vectors are {lengths.mean():.3g} long on average"
        )


def encoding(model: nn.Module, length: int = 128) -> Encoding:
    """The table of a model's scheme at the input embedding; of several, the first one's."""
    with positioned(model) as base:
        _, scheme = schemes_with(base, "embed", "table of positions", ELSEWHERE)[0]
        posenc = positions_of(base, length)
        table = vectors_of(base, scheme, posenc)[0].float()
        return Encoding(names_of(base), table.expand(length, -1).clone().cpu())
