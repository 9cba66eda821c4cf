"""The recipes of a training run, by the names that `--recipe` takes."""

from __future__ import annotations

import dataclasses

from ..errors import PosEncError
from ..patches import Architecture
from ..schemes import Kind
from ..spec import NO_POSITIONS, PositionScheme, parse_position_scheme
from .distillation import LossWeights

DEFAULT_FIT_RATIO = 0.1


@dataclasses.dataclass(frozen=True)
class Recipe:
    """The steps of a training run, in order.

    Attributes:
        absorb_table_mean: Keep the mean of a dropped position table, in architectures with an embedding to hold it.
        reorder_heads: Give each bias the head that suits it best, see `closed_form_start`.
        fold_rotation: Keep the mean of a dropped rotation, in the query weights.
        match_biases: Start biases by distance from how much the stock model attends to each distance.
        fit_ratio: Tokens to fit attention on before training, as a fraction of the training tokens. None: a tenth
            where fitting helps, see `resolve_fit_ratio`.
        teacher: Distill from the stock model instead of learning from the text alone.
        loss_weights: Weights of the terms of the distillation loss.
        hidden_loss_until: Fraction of the training over which the hidden-state loss fades to zero. Hidden states
            speed up the start, but a model with a new encoding need not reproduce them to the end.
        position_lr_multiplier: Learning rate of the scheme's parameters, relative to all others. They start
            untrained, and most are biases that need larger steps than weights inside matrix products.
        scheme: The new position scheme of a stock model if the request names none.

    Raises:
        PosEncError: If a value is out of range.
    """

    absorb_table_mean: bool = True
    reorder_heads: bool = True
    fold_rotation: bool = True
    match_biases: bool = True
    fit_ratio: float | None = None
    teacher: bool = True
    loss_weights: LossWeights = LossWeights()
    hidden_loss_until: float = 1.0
    position_lr_multiplier: float = 20.0
    scheme: PositionScheme | None = None

    def __post_init__(self) -> None:
        if self.fit_ratio is not None and not 0 <= self.fit_ratio <= 1:
            raise PosEncError(f"fit_ratio (--fit-ratio) must be between 0 and 1, got {self.fit_ratio!r}")
        if not (self.hidden_loss_until >= 0 and self.position_lr_multiplier > 0):
            raise PosEncError(f"hidden_loss_until must be at least 0 and position_lr_multiplier above 0, got {self}")

    @property
    def starts_from_stock_model(self) -> bool:
        """Whether anything happens before the training."""
        pieces = (self.absorb_table_mean, self.reorder_heads, self.fold_rotation, self.match_biases)
        return any(pieces) or self.fit_ratio != 0


RECOMMENDED = Recipe()
NAIVE = Recipe(
    absorb_table_mean=False,
    reorder_heads=False,
    fold_rotation=False,
    match_biases=False,
    fit_ratio=0.0,
    teacher=False,
    position_lr_multiplier=1.0,
)
"""The baseline: change the encoding and fine-tune on text."""
DROPE = dataclasses.replace(RECOMMENDED, scheme=NO_POSITIONS)
"""Drop the positions of a trained model and recalibrate it (Gelberg et al. 2025, https://arxiv.org/abs/2512.12167).

The paper continues the pretraining on text alone. Here the original teaches, as in the recommended recipe.
"""
NOPE_LAYERS = dataclasses.replace(RECOMMENDED, scheme={"type": NO_POSITIONS, "layers": "3::4"})
"""No positions in every fourth layer, as in SmolLM3 (Yang et al. 2025, https://arxiv.org/abs/2501.18795)."""
P_ROPE = dataclasses.replace(RECOMMENDED, scheme={"type": "rope", "frequency_fraction": 0.75})
"""No rotation at the lowest quarter of the frequencies (Barbero et al. 2024, https://arxiv.org/abs/2410.06205)."""
RECIPES = {
    "recommended": RECOMMENDED,
    "naive": NAIVE,
    "drope": DROPE,
    "nope-layers": NOPE_LAYERS,
    "p-rope": P_ROPE,
}


def get_recipe(name: str, scheme: PositionScheme | None) -> Recipe:
    """Look up a recipe. Raises PosEncError if there is none of this name, or it is about another scheme than given."""
    if name not in RECIPES:
        raise PosEncError(f"Unknown --recipe {name!r}; expected one of {sorted(RECIPES)}")
    recipe = RECIPES[name]
    if scheme is None or recipe.scheme is None:
        return recipe
    (expected,), given = parse_position_scheme(recipe.scheme), parse_position_scheme(scheme)
    # Attention temperature alone carries no positions.
    has_no_positions = all(spec.scheme.kind in (Kind.NOTHING, Kind.TEMPERATURE) for spec in given)
    fits = expected.name in {spec.name for spec in given} or (expected.name == NO_POSITIONS and has_no_positions)
    if not fits:
        raise PosEncError(
            f"--recipe {name} is about the scheme {expected.name}, but --scheme has "
            f"{', '.join(spec.name for spec in given)}: leave one of them out"
        )
    return recipe


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
