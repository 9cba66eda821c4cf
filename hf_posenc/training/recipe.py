"""Training recipes: how a model regains its quality after its position encoding has changed."""

from __future__ import annotations

import dataclasses
import math

from transformers import PreTrainedConfig

from ..errors import PosEncError
from ..patches import Architecture
from ..schemes import Kind
from ..spec import PositionScheme, parse_position_scheme
from .distillation import LossWeights

DEFAULT_FIT_RATIO = 0.1
REFERENCE_LEARNING_RATE, REFERENCE_HIDDEN_SIZE = 4e-3, 64
"""The learning rate that worked best for a model of this width; see benchmarks/RECOVERY.md."""


@dataclasses.dataclass(frozen=True)
class Recipe:
    """The steps of a training run, in order.

    Attributes:
        absorb_table_mean: Keep the mean of a dropped position table, in architectures with an embedding to hold it.
        fit_ratio: Tokens to fit attention on before training, as a fraction of the training tokens. None: a tenth
            where fitting helps, see `resolve_fit_ratio`.
        teacher: Distill from the stock model instead of learning from the text alone.
        loss_weights: Weights of the terms of the distillation loss.
        hidden_loss_until: Fraction of the training over which the hidden-state loss fades to zero. Hidden states
            speed up the start, but a model with a new encoding need not reproduce them to the end.
        position_lr_multiplier: Learning rate of the scheme's parameters, relative to all others. They start
            untrained, and most are biases that need larger steps than weights inside matrix products.

    Raises:
        PosEncError: If a value is out of range.
    """

    absorb_table_mean: bool = True
    fit_ratio: float | None = None
    teacher: bool = True
    loss_weights: LossWeights = LossWeights()
    hidden_loss_until: float = 1.0
    position_lr_multiplier: float = 20.0

    def __post_init__(self) -> None:
        ratio = self.fit_ratio
        if ratio is not None and not (isinstance(ratio, (int, float)) and 0 <= ratio <= 1):
            raise PosEncError(f"fit_ratio (--fit-ratio) must be between 0 and 1, got {ratio!r}")
        if not self.hidden_loss_until >= 0:
            raise PosEncError(f"hidden_loss_until must be at least 0, got {self.hidden_loss_until!r}")
        if not self.position_lr_multiplier > 0:
            raise PosEncError(f"position_lr_multiplier must be above 0, got {self.position_lr_multiplier!r}")


RECOMMENDED = Recipe()
NAIVE = Recipe(absorb_table_mean=False, fit_ratio=0.0, teacher=False, position_lr_multiplier=1.0)
"""The baseline: change the encoding and fine-tune on text."""
RECIPES = {"recommended": RECOMMENDED, "naive": NAIVE}


def resolve_fit_ratio(recipe: Recipe, architecture: Architecture, scheme: PositionScheme) -> float:
    """The recipe's fit ratio, or the default where fitting helps.

    It helps to replace a rotation, which acts in attention alone. A position table acts on the whole model: a rotation
    or a content-dependent term can take over its effect on attention, but a distance bias cannot do enough of it, and
    another table has no need to.
    """
    if recipe.fit_ratio is not None:
        return recipe.fit_ratio
    kinds = {spec.scheme.kind for spec in parse_position_scheme(scheme)}
    replaces_table = bool(kinds & {Kind.ROTATION, Kind.CONTENT}) and Kind.INPUT not in kinds
    return DEFAULT_FIT_RATIO if architecture.rotary or replaces_table else 0.0


def default_learning_rate(config: PreTrainedConfig) -> float:
    """The learning rate for a model: it falls with the square root of the width."""
    return REFERENCE_LEARNING_RATE * math.sqrt(REFERENCE_HIDDEN_SIZE / config.hidden_size)
