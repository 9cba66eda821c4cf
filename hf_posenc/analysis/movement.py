"""How much each feature of an encoding moves over the positions: many hardly do."""

from __future__ import annotations

import dataclasses

import torch

from .encoding import Encoding
from .subspaces import participation

STILL = 0.05
"""A feature hardly moves if it covers less than this share of what the most mobile tenth of the features covers."""

MOBILE = 0.9
"""The quantile of ranges that counts as wide. Not the widest: trained tables have a few features far beyond others."""


@dataclasses.dataclass(frozen=True)
class Movement:
    """What each feature does from the first position to the last."""

    name: str
    positions: int
    ranges: torch.Tensor
    """(features,): highest less lowest value."""
    spreads: torch.Tensor
    """(features,): standard deviation."""
    wide: float
    """The range that the most mobile tenth of the features has or exceeds."""
    threshold: float
    """The range below which a feature hardly moves: a small share of that."""
    moving: float
    """How many features share the variance: the participation ratio of theirs."""

    @property
    def still(self) -> torch.Tensor:
        """(features,): True where a feature hardly moves."""
        return self.ranges < self.threshold

    @property
    def still_upper(self) -> float:
        """Share of the upper half of the features that hardly moves."""
        return self.still[len(self.ranges) // 2 :].float().mean().item()

    def __str__(self) -> str:
        features = len(self.ranges)
        return (
            f"{self.name}: over {self.positions} positions, {int(self.still.sum())} of {features} features hardly move "
            f"(less than {self.threshold:.3g} between their lowest and highest), {self.still_upper:.0%} of the upper "
            f"half; the variance is shared by {self.moving:.1f}"
        )


def movement(encoding: Encoding, still: float = STILL) -> Movement:
    """How far each feature of an encoding goes; `still` is the share of a wide range that counts as none."""
    if not 0 < still < 1:
        raise ValueError(f"still must be above 0 and below 1, got {still}")
    table = encoding.table.double()
    ranges = table.amax(0) - table.amin(0)
    wide = ranges.quantile(MOBILE).item()
    return Movement(
        name=encoding.name,
        positions=len(table),
        ranges=ranges,
        spreads=table.std(0, correction=0),
        wide=wide,
        threshold=still * wide,
        moving=participation(table.var(0, correction=0)),
    )
