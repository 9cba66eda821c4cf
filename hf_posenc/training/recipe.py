"""How a model is brought back to quality after its encoding was changed."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from .teacher import Weights

REFERENCE_RATE, REFERENCE_WIDTH = 4e-3, 64
"""The learning rate that did best on a model of this width; see benchmarks/RECOVERY.md."""


@dataclasses.dataclass(frozen=True)
class Recipe:
    """What is done, in the order of the fields."""

    fit: float = 0.2
    """The share of the training that is spent on fitting each layer's attention to that of the old encoding."""
    handover: float = 0.0
    """The share of the training steps over which the old encoding gives way; 0: at once."""
    teacher: bool = True
    """Learn from the model as it was, rather than from the text alone."""
    weights: Weights = Weights()

    def __post_init__(self) -> None:
        for name, share in (("fit", self.fit), ("handover", self.handover)):
            if not (isinstance(share, (int, float)) and 0 <= share <= 1):
                raise ValueError(f"--{name}-share is a share of the training from 0 to 1, got {share!r}")


RECOMMENDED = Recipe()
NAIVE = Recipe(fit=0.0, handover=0.0, teacher=False)
"""Change the encoding and fine-tune: what one would do without any of this."""
RECIPES = {"recommended": RECOMMENDED, "naive": NAIVE}


def recommended_learning_rate(config: Any) -> float:
    """Falls with the root of the width, as the best rates of the measured models do."""
    return REFERENCE_RATE * math.sqrt(REFERENCE_WIDTH / config.hidden_size)
