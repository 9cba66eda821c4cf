"""The settings of a rotation in the terms of transformers' `rope_parameters`."""

from __future__ import annotations

from typing import Any

from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from ..errors import PosEncError
from ..validation import truncate_repr
from .functional import BASE
from .options import describe_type, matches_type

LIST_KEYS = {"short_factor", "long_factor"}
NUMBER_KEYS = {
    *("rope_theta", "factor", "original_max_position_embeddings", "attention_factor", *LIST_KEYS),
    *("beta_fast", "beta_slow", "mscale", "mscale_all_dim", "low_freq_factor", "high_freq_factor"),
}
SCALING_KEYS = {"rope_type", "truncate", *NUMBER_KEYS}
NEEDS_ORIGINAL_LENGTH = ("llama3", "yarn", "longrope")
CHANGES_WITH_LENGTH = ("dynamic", "longrope")


def resolve_rope_parameters(
    own: dict[str, Any] | None, theta: float | None, given: dict[str, Any] | None, max_positions: int
) -> dict[str, Any]:
    """The `rope_parameters` that transformers would use for a rotation.

    Args:
        own: Those of the checkpoint; None if it does not rotate.
        theta: The base of the wavelengths, if it is given.
        given: The scaling, if it is given. Given values override the checkpoint's.
        max_positions: The length that the checkpoint was trained for.

    Returns:
        The parameters, with a `rope_type` and a `rope_theta`.

    Raises:
        PosEncError: If a setting is unknown, missing or out of range.
    """
    stock, scaling = own or {}, given or {}
    valid_types = sorted({"default", *ROPE_INIT_FUNCTIONS})
    if unknown := sorted(set(scaling) - SCALING_KEYS):
        raise PosEncError(f"rope: scaling has no setting {unknown[0]!r}; expected some of {sorted(SCALING_KEYS)}")
    for key in NUMBER_KEYS & scaling.keys():
        for number in scaling[key] if isinstance(scaling[key], list) else [scaling[key]]:
            if matches_type(number, float) and number <= 0:
                raise PosEncError(f"rope: scaling: {key} must be above 0, got {number!r}")
    if given is not None and "rope_type" not in scaling:
        raise PosEncError(f"rope: scaling needs a rope_type, one of {valid_types}")
    inherits = given is None and theta is None
    parameters = {"rope_type": "default", **(stock if inherits else scaling)}
    parameters["rope_theta"] = theta or parameters.get("rope_theta") or stock.get("rope_theta") or BASE
    rope_type = parameters["rope_type"]
    if rope_type not in valid_types:
        raise PosEncError(f"rope: scaling: rope_type {rope_type!r} is unknown; expected one of {valid_types}")
    parameters = {key: value for key, value in parameters.items() if value is not None}
    for key in NUMBER_KEYS & parameters.keys():
        hint = list[float] if key in LIST_KEYS else float
        if not matches_type(parameters[key], hint):
            raise PosEncError(
                f"rope: scaling: {key} must be {describe_type(hint)}, got {truncate_repr(parameters[key])}"
            )
    if rope_type in NEEDS_ORIGINAL_LENGTH:
        parameters.setdefault("original_max_position_embeddings", max_positions)
    return parameters
