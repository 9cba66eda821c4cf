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

Rotations = dict[str, Rope]
"""The rotation of each layer type; all layers have the type "" if the stock config knows one rotation only."""


def stock_rope_parameters(
    architecture: Architecture, config: PreTrainedConfig, plan: SchemePlan
) -> dict[str, Any] | None:
    """The `rope_parameters` with which a stock config alone gives a variant's result, if there are any."""
    stock_config = copy.deepcopy(config)
    stock_config.become_stock()
    try:
        rotations = _stock_rotations(architecture, stock_config, plan)
    except NoStockEqual:
        return None
    if _common_layout(rotations) != architecture.shape(config).rotary_layout:
        return None
    _set_rotations(stock_config, rotations)
    parameters: dict[str, Any] = stock_config.rope_parameters
    return parameters


def _plan(variant: Variant, max_positions: int | None) -> ExportPlan:
    architecture, config = variant.architecture, variant.stock_config()
    rotations = _stock_rotations(architecture, config, variant.plan)
    plan = ExportPlan(config, variant.head, variant.head, names=scheme_names(variant))
    stock_layout, layout = variant.shape.rotary_layout, _common_layout(rotations)
    if layout != stock_layout:
        change = "interleaved_to_halves" if stock_layout == "halves" else "halves_to_interleaved"
        rope, *others = rotations.values()
        if any(other.rotary_size != rope.rotary_size for other in others):
            raise NoStockEqual("layers rotate different fractions of their heads, in another layout")
        plan.transforms = reordered_heads(variant, change, rope, ["q_", "k_"])  # type: ignore[arg-type]
    _set_rotations(config, rotations)
    trained = config.max_position_embeddings
    changed = [rope for rope in rotations.values() if not rope.keeps_stock_rotation()]
    if changed or max_positions is not None:
        config.max_position_embeddings = max(
            rotary_length(rope, trained, max_positions) for rope in changed or rotations.values()
        )
    for rope in rotations.values():
        plan.notes += [note for note in length_notes(rope, trained) if note not in plan.notes]
    plan.checked_position = trained + 3
    return plan


def _stock_rotations(architecture: Architecture, stock_config: PreTrainedConfig, plan: SchemePlan) -> Rotations:
    """The rotations of a variant, if its stock model can compute them in the same layers and to the same extent."""
    if not architecture.rotary:
        raise NoStockEqual(f"{architecture.model_type} does not rotate queries and keys")
    layers, stock = layer_rotations(plan), stock_config.rope_parameters
    layer_types = [""] * len(layers)
    if any(isinstance(value, dict) for value in stock.values()):
        layer_types = list(stock_config.layer_types)
    of_types = {
        name: [layer for layer, layer_type in zip(layers, layer_types, strict=True) if layer_type == name]
        for name in dict.fromkeys(layer_types)
    }
    rotations = {name: rotation_of_all_layers(of_type) for name, of_type in of_types.items()}
    for rope in rotations.values():
        if not rope.keeps_stock_rotation():
            _check_extent(architecture, rope)
    return rotations


def _check_extent(architecture: Architecture, rope: Rope) -> None:
    if architecture.rotates is not None:
        raise NoStockEqual(f"a stock {architecture.model_type} does not rotate in all layers")
    if architecture.position_axes > 1:
        raise NoStockEqual(f"a stock {architecture.model_type} rotates by positions in images too")
    stock_factor = (rope.shape.rope_parameters or {}).get("partial_rotary_factor")
    if rope.partial_rotary_factor != (stock_factor or 1.0) and stock_factor is None:
        raise NoStockEqual(f"a stock {architecture.model_type} always rotates whole heads")


def _common_layout(rotations: Rotations) -> str:
    """The order of features in all heads, which is that of the weights."""
    layouts = {rope.layout for rope in rotations.values()}
    if len(layouts) > 1:
        raise NoStockEqual("layers have different layouts")
    return layouts.pop()


def _set_rotations(config: PreTrainedConfig, rotations: Rotations) -> None:
    """Set the rotations of a stock config, except for those that are its own."""
    changed = {
        name: rope_parameters(rope, partial="partial_rotary_factor" in (rope.shape.rope_parameters or {}))
        for name, rope in rotations.items()
        if not rope.keeps_stock_rotation()
    }
    if not changed:
        return
    config.rope_parameters = changed.get("", {**config.rope_parameters, **changed})
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
