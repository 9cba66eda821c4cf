"""Variants that only rotate queries and keys: which rotation each layer has, and in which order its features are."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ...errors import PosEncError
from ...patches import SchemePlan
from ...schemes.base import LAYER_SEAMS, STOCK_ROTATION
from ...schemes.rope_parameters import CHANGES_WITH_LENGTH
from ...schemes.rotary import Rope
from ..companions import to_json_bytes
from ..weights import RotaryChange, Transform, reorder_rows, rotary_feature_order
from .variant import NoStockEqual, Variant

OWN_FIELDS = ("rope_theta", "partial_rotary_factor")
"""Settings with a field of their own in the configs of transformers 4; the others are in `rope_scaling`."""


def layer_rotations(plan: SchemePlan) -> list[Rope | None]:
    """The rotation of each layer, if any. Raises `NoStockEqual` if a scheme acts elsewhere, or is not `rope`."""
    rotations: list[Rope | None] = []
    if plan.state.at_embedding:
        raise NoStockEqual(f"{plan.schemes[plan.state.at_embedding[0]].name} acts at the input embedding")
    for seams in plan.state.active:
        for seam in LAYER_SEAMS[1:]:
            if seams[seam]:
                raise NoStockEqual(f"{plan.schemes[seams[seam][0]].name} changes the attention scores or values")
        schemes = [plan.schemes[index] for index in (*seams["rotate"], *seams[STOCK_ROTATION])]
        if len(schemes) > 1:
            raise NoStockEqual("several rotations act in one layer")
        if schemes and not isinstance(schemes[0], Rope):
            raise NoStockEqual(f"{schemes[0].name} is not a plain rotation")
        rope: Rope | None = schemes[0] if schemes else None  # type: ignore[assignment]
        if rope is not None and rope.options.frequency_fraction < 1:
            raise NoStockEqual("frequency_fraction leaves frequencies out")
        if rope is not None and (rope.options.resonance or rope.options.fourier is not None):
            raise NoStockEqual("resonance and fourier change the frequencies")
        rotations.append(rope)
    return rotations


def common_rotation(rotations: Iterable[Rope | None]) -> Rope | None:
    """The one rotation of all layers that have any. Raises `NoStockEqual` if they differ."""
    present = [rope for rope in rotations if rope is not None]
    if any(_settings(rope) != _settings(present[0]) for rope in present):
        raise NoStockEqual("layers rotate by different angles")
    return present[0] if present else None


def rotation_of_all_layers(rotations: Sequence[Rope | None]) -> Rope:
    """The one rotation of all layers. Raises `NoStockEqual` if any layer has another or none."""
    rope = common_rotation(rotations)
    missing = [layer for layer, rotation in enumerate(rotations) if rotation is None]
    if rope is None or missing:
        raise NoStockEqual("no layer has a rotation" if rope is None else f"layer {missing[0]} has no rotation")
    return rope


def _settings(rope: Rope) -> tuple[Any, ...]:
    """What the angles of a rotation depend on. The checkpoint's own settings, by layer type, are part of its shape."""
    shape = rope.shape if rope.keeps_stock_rotation() else dataclasses.replace(rope.shape, rope_parameters=None)
    return rope.rope_parameters, rope.layout, rope.partial_rotary_factor, shape


def rope_parameters(rope: Rope, partial: bool) -> dict[str, Any]:
    """The `rope_parameters` of a stock config, with the rotated fraction if the model type knows it."""
    parameters = {key: value for key, value in rope.rope_parameters.items() if key != "partial_rotary_factor"}
    return parameters | ({"partial_rotary_factor": rope.partial_rotary_factor} if partial else {})


def depends_on_length(rope: Rope | None) -> bool:
    """Whether the angles change with the length of the input."""
    return rope is not None and rope.rope_type in CHANGES_WITH_LENGTH


def rotary_length(rope: Rope | None, trained: int, max_positions: int | None) -> int:
    """`max_position_embeddings` of a stock config: what was asked for, unless it would change the angles."""
    if rope is None or rope.rope_type not in (*CHANGES_WITH_LENGTH, "yarn"):
        return trained if max_positions is None else max_positions
    if max_positions is not None:
        raise PosEncError(
            f"max_positions cannot be set: with {rope.rope_type!r} scaling, angles depend on max_position_embeddings"
        )
    if depends_on_length(rope):
        return trained
    # Releases before 5 compute the factor from these two lengths, whatever `factor` says.
    original, factor = (rope.rope_parameters[name] for name in ("original_max_position_embeddings", "factor"))
    return max(trained, round(original * factor))


def length_notes(rope: Rope | None, trained: int) -> list[str]:
    """What to know about a stock model whose angles change with the length."""
    if not depends_on_length(rope):
        return []
    assert rope is not None
    return [
        f"{rope.rope_type} scaling changes all angles with the length. Past {trained} tokens, stock models keep the "
        "angles of the longest input so far, and caches keep keys with old angles, so results depend on what ran "
        "before; the variant refuses that"
    ]


def reordered_heads(variant: Variant, change: RotaryChange, rope: Rope, modules: Sequence[str]) -> dict[str, Transform]:
    """Reorder the rotary features of queries and keys, in the tensors whose rows they are.

    The names of these projections and norms inside self-attention begin with one of `modules`, such as "q_".
    """
    order = rotary_feature_order(change, variant.shape.head_size, rope.rotary_size)
    transforms: dict[str, Transform] = {}
    for layer in range(variant.shape.num_layers):
        path = variant.attention_path(layer)
        for module in modules:
            start = f"{path}.{module}"
            names = [name for parameter, name in variant.stored_names.items() if parameter.startswith(start)]
            if not names or any(len(variant.tensors[name]) % len(order) for name in names):
                raise NoStockEqual(f"{variant.model_type} has no separate query and key projections to reorder")
            transforms |= dict.fromkeys(names, partial(reorder_rows, order=order))
    return transforms


def rotation_table(rope: Rope, num_positions: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The sines and cosines of each position and pair of features: two of (positions, head size / 2).

    Pairs that are not rotated have the angle 0.
    """
    angles = torch.arange(num_positions)[:, None].float() * torch.tensor(rope.frequencies)
    sin, cos = angles.sin() * rope.attention_factor, angles.cos() * rope.attention_factor
    rest = (num_positions, rope.shape.head_size // 2 - sin.shape[1])
    return torch.cat([sin, torch.zeros(rest)], dim=1), torch.cat([cos, torch.ones(rest)], dim=1)


def add_older_rope_fields(path: Path) -> None:
    """Repeat `rope_parameters` of a config.json in the fields of transformers 4. transformers 5 reads both alike.

    transformers 4 and tools that follow it do not know `rope_parameters`, and would silently rotate by their default
    angles. Settings per type of layer have no such fields, and are left alone.
    """
    fields = json.loads(path.read_text(encoding="utf-8"))
    parameters = fields.get("rope_parameters")
    if not parameters or any(isinstance(value, dict) for value in parameters.values()):
        return
    fields |= {name: parameters[name] for name in OWN_FIELDS if name in parameters}
    if parameters.get("rope_type", "default") != "default":
        fields["rope_scaling"] = {name: value for name, value in parameters.items() if name not in OWN_FIELDS}
    path.write_bytes(to_json_bytes(fields))
