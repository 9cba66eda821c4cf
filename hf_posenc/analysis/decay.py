"""How alike two equal vectors still are once a rotation has turned them by their positions."""

from __future__ import annotations

import dataclasses

import torch
from torch import nn

from ..attention.function import apply_rotation
from .subjects import names_of, positioned, positions_of, refuse_layer
from .turning import turning, turns_of


@dataclasses.dataclass(frozen=True)
class Decay:
    """The product of a query and an equal key, with the same in every feature, over what it is at distance 0 unturned.

    For rope that is the mean of the cosines of all angles.
    """

    name: str
    similarity: torch.Tensor
    """(N,): by how far the key is behind the query."""
    by_pair: torch.Tensor
    """(F, N): of each pair of features by itself, fastest first."""
    wavelengths: torch.Tensor
    """(F,): positions for a whole turn of each pair."""

    def __str__(self) -> str:
        below = (self.similarity < 0.5).nonzero()
        half = f"below one half from distance {int(below[0])} on" if len(below) else "never below one half"
        slow = int((self.wavelengths > len(self.similarity)).sum())
        return (
            f"{self.name}: similarity {half}, {self.similarity[-1]:.3f} at distance {len(self.similarity) - 1}; "
            f"{slow} of {len(self.wavelengths)} pairs do not turn once in {len(self.similarity)} positions"
        )


def decay(model: nn.Module, length: int = 512, layer: int = 0) -> Decay:
    """The similarity by distance under the rotation of a layer."""
    with positioned(model) as base:
        refuse_layer(base, layer)
        posenc = positions_of(base, length)
        found, turns = turning(posenc, layer, names_of(base)), turns_of(posenc, layer)
        size = base.position_scheme[0].shape.head_size
        same = torch.ones(1, 1, length, size, device=posenc.queries_BQ.device)
        query, keys = (apply_rotation(same, turns, is_key)[0, 0].double().cpu() for is_key in (False, True))
        products = (query[-1] * keys).flip(0)
        by_pair = products[:, found.pairs].mean(-1).T
        return Decay(names_of(base), products.mean(-1), by_pair.clone(), found.wavelengths)
