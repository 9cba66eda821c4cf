"""How a model is brought back to quality after its encoding was changed."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from ..schemes.base import Kind
from ..spec import parse_position_scheme
from .teacher import Weights

FIT_SHARE = 0.1
REFERENCE_RATE, REFERENCE_WIDTH = 4e-3, 64
"""The learning rate that did best on a model of this width; see benchmarks/RECOVERY.md."""


@dataclasses.dataclass(frozen=True)
class Recipe:
    """What is done, in the order of the fields."""

    centre: bool = True
    """Keep what the old table added at all positions alike, where there is a place for it."""
    fit: float | None = None
    """As a share of the training's tokens, how many each layer's attention is fitted to that of the old encoding on,
    before. None: a tenth where that gains something, see `share_to_fit`."""
    teacher: bool = True
    """Learn from the model as it was, rather than from the text alone."""
    weights: Weights = Weights()
    states_until: float = 1.0
    """The share of the training over which states inside of the teacher fade from the loss: they lead the way, but a
    new encoding need not take the old one's to the end."""
    position_rate: float = 20.0
    """The learning rate of the scheme's own parameters, as a multiple of that of the others: they begin with nothing
    learnt, and most of them are biases, which are read as they are and not through a product of many."""

    def __post_init__(self) -> None:
        if self.fit is not None and not (isinstance(self.fit, (int, float)) and 0 <= self.fit <= 1):
            raise ValueError(f"--fit-share is a share of the training from 0 to 1, got {self.fit!r}")
        if not (self.states_until >= 0 and self.position_rate > 0):
            raise ValueError(
                f"states_until must not be negative, and position_rate above 0; got {self.states_until} and "
                f"{self.position_rate}"
            )


RECOMMENDED = Recipe()
NAIVE = Recipe(centre=False, fit=0.0, teacher=False, position_rate=1.0)
"""Change the encoding and fine-tune: what one would do without any of this."""
RECIPES = {"recommended": RECOMMENDED, "naive": NAIVE}


def share_to_fit(recipe: Recipe, architecture: Any, scheme: Any) -> float:
    """What the recipe says, or else a tenth under an old rotation, which acts in attention alone. The rows of an old
    table run through the whole model: a new rotation, or terms that depend on the content, can take over what they do
    in attention; a bias by distance cannot do enough of it, and new rows need not."""
    if recipe.fit is not None:
        return recipe.fit
    kinds = {item.scheme.kind for item in parse_position_scheme(scheme)}
    takes_over = bool(kinds & {Kind.ROTATION, Kind.CONTENT}) and Kind.INPUT not in kinds
    return FIT_SHARE if architecture.rotary or takes_over else 0.0


def recommended_learning_rate(config: Any) -> float:
    """Falls with the root of the width, as the best rates of the measured models do."""
    return REFERENCE_RATE * math.sqrt(REFERENCE_WIDTH / config.hidden_size)
