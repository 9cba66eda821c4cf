"""The recipes by name, as `--recipe` takes them."""

from __future__ import annotations

import dataclasses

from ..errors import PosEncError
from ..schemes import Kind
from ..spec import NO_POSITIONS, PositionScheme, parse_position_scheme
from .arguments import NAIVE, RECOMMENDED, Recipe

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


def get_recipe(name: str, scheme: PositionScheme | None = None) -> Recipe:
    """Look up a recipe.

    Args:
        name: One of `RECIPES`.
        scheme: The scheme that was asked for; None: that of the recipe, or the variant's.

    Returns:
        The recipe.

    Raises:
        PosEncError: If there is no such recipe, or it is about another scheme.

    Example:
        >>> get_recipe("drope", {"type": "none", "except_layers": [0]}).scheme
        'none'
    """
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
