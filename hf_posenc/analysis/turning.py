"""Which features of a head a rotation turns together, and how fast: found by turning unit vectors."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch

from ..attention.function import apply_rotation
from ..schemes.base import STOCK_ROTATION
from ..schemes.inputs import Positions

NO_ROTATION = "nothing is turned in layer {layer} of {name}: rope and xpos turn queries and keys"


class NothingTurns(ValueError):
    """There is no rotation to look at."""


@dataclasses.dataclass(frozen=True)
class Turning:
    """The pairs of features that turn, fastest first."""

    pairs: torch.Tensor
    """(F, 2): features of a head."""
    rates: torch.Tensor
    """(F,): radians a position."""

    @property
    def wavelengths(self) -> torch.Tensor:
        """(F,): positions for a whole turn."""
        return 2 * math.pi / self.rates


def turns_of(posenc: Positions, layer: int) -> list[tuple[Any, Any, Any]]:
    """The schemes that turn queries and keys in a layer, also where the architecture does it by their angles."""
    acting = posenc.active[layer]
    places = (*acting["rotate"], *acting[STOCK_ROTATION])
    return [(posenc.schemes[place], posenc.prepared[place], None) for place in places]


def turning(posenc: Positions, layer: int, name: str) -> Turning:
    """Found at position 1, so that a row of two tokens or more is needed."""
    turns = turns_of(posenc, layer)
    if not turns:
        raise NothingTurns(NO_ROTATION.format(layer=layer, name=name))
    length, size = posenc.queries_BQ.shape[-1], posenc.schemes[0].shape.head_size
    if length < 2:
        raise ValueError("a rotation shows from the second position on: take a length of at least 2")
    units = torch.eye(size, device=posenc.queries_BQ.device)
    images = torch.stack([apply_rotation(row.expand(1, 1, length, size), turns, False)[0, 0, 1] for row in units])
    images = images.double().cpu()
    pairs, rates = [], []
    for feature in range(size):
        others = [other for other in images[feature].nonzero()[:, 0].tolist() if other != feature]
        if len(others) > 1:
            raise ValueError(f"{name} turns more than two features together: its rotations have different layouts")
        if others and feature < others[0]:
            pairs.append((feature, others[0]))
            sine, cosine = images[feature, others[0]].abs(), images[feature, feature]
            rates.append(math.atan2(sine.item(), cosine.item()))
    order = torch.tensor(rates).argsort(descending=True, stable=True)
    return Turning(torch.tensor(pairs)[order], torch.tensor(rates, dtype=torch.float64)[order])
