"""A rotary model with `rope`: the same model type with other `rope_parameters`."""

from __future__ import annotations

import copy
from typing import Any

from transformers import PreTrainedConfig

from ...patches import Architecture, SchemePlan
from ...schemes.rotary import Rope
from ..inspection import is_scheme_parameter
from .plan import Exporter, ExportPlan
from .rotations import (
    layer_rotations,
    length_notes,
    reordered_heads,
    rope_parameters,
    rotary_length,
    rotation_of_all_layers,
)
from .variant import NoStockEqual, Variant


def stock_rope_parameters(
    architecture: Architecture, config: PreTrainedConfig, plan: SchemePlan
) -> dict[str, Any] | None:
    """The `rope_parameters` with which a stock config alone gives a variant's result, if there are any."""
    try:
        rope = _stock_rotation(architecture, plan)
    except NoStockEqual:
        return None
    if rope.layout != architecture.shape(config).rotary_layout:
        return None
    stock_config = copy.deepcopy(config)
    stock_config.become_stock()
    _set_rotation(stock_config, rope)
    parameters: dict[str, Any] = stock_config.rope_parameters
    return parameters


def _plan(variant: Variant, max_positions: int | None) -> ExportPlan:
    architecture, config = variant.architecture, variant.stock_config()
    rope = _stock_rotation(architecture, variant.plan)
    plan = ExportPlan(config, variant.head, variant.head, names=scheme_names(variant))
    stock_layout = variant.shape.rotary_layout
    if rope.layout != stock_layout:
        change = "interleaved_to_halves" if stock_layout == "halves" else "halves_to_interleaved"
        plan.transforms = reordered_heads(variant, change, rope, ["q_", "k_"])  # type: ignore[arg-type]
    _set_rotation(config, rope)
    trained = config.max_position_embeddings
    if not rope.keeps_stock_rotation() or max_positions is not None:
        config.max_position_embeddings = rotary_length(rope, trained, max_positions)
    plan.notes += length_notes(rope, trained)
    plan.checked_position = trained + 3
    return plan


def _stock_rotation(architecture: Architecture, plan: SchemePlan) -> Rope:
    """The rotation of a variant, if its stock model can compute it in the same layers and to the same extent."""
    if not architecture.rotary:
        raise NoStockEqual(f"{architecture.model_type} does not rotate queries and keys")
    rope = rotation_of_all_layers(layer_rotations(plan))
    if rope.keeps_stock_rotation():
        return rope
    if architecture.rotates is not None:
        raise NoStockEqual(f"a stock {architecture.model_type} does not rotate in all layers")
    if architecture.position_axes > 1:
        raise NoStockEqual(f"a stock {architecture.model_type} rotates by positions in images too")
    stock_factor = (rope.shape.rope_parameters or {}).get("partial_rotary_factor")
    if rope.partial_rotary_factor != (stock_factor or 1.0) and stock_factor is None:
        raise NoStockEqual(f"a stock {architecture.model_type} always rotates whole heads")
    return rope


def _set_rotation(config: PreTrainedConfig, rope: Rope) -> None:
    """Set the rotation of a stock config, of every layer type if they have their own."""
    if rope.keeps_stock_rotation():
        return
    stock = config.rope_parameters
    parameters = rope_parameters(rope, partial="partial_rotary_factor" in (rope.shape.rope_parameters or {}))
    nested = {key: value for key, value in stock.items() if isinstance(value, dict)}
    config.rope_parameters = {key: dict(parameters) for key in nested} if nested else parameters
    for name in ("rope_theta", "rope_scaling"):  # of releases before rope_parameters; both would count
        vars(config).pop(name, None)


def scheme_names(variant: Variant) -> dict[str, str | None]:
    """The parameters of schemes, to leave out."""
    return {name: None for name, parameter in variant.model_names.items() if is_scheme_parameter(parameter)}


SAME_ROTATION = Exporter(
    target="the same model type, with other rope_parameters",
    accepts="`rope` in all layers, with any theta, scaling and layout",
    applies=lambda variant: variant.architecture.rotary,
    plan=_plan,
)
