"""LLaMA with `rope` in some layers, or without positions: SmolLM3, whose `no_rope_layers` says where it rotates."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from transformers import SmolLM3Config

from .plan import Exporter, ExportPlan, common_fields
from .rotations import (
    common_rotation,
    layer_rotations,
    length_notes,
    reordered_heads,
    rope_parameters,
    rotary_length,
)
from .same_rotation import scheme_names
from .variant import NoStockEqual, Variant

HEADS = ("Model", "ForCausalLM", "ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering")
CLASS_PREFIXES = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "smollm3": "SmolLM3"}
"""Model types whose layers are SmolLM3's, and the beginnings of their class names."""
FIELDS = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    *("hidden_act", "max_position_embeddings", "rms_norm_eps", "attention_dropout"),
)


def _plan(variant: Variant, max_positions: int | None) -> ExportPlan:
    stock, rotations = variant.stock_config(), layer_rotations(variant.plan)
    if variant.model_type == "smollm3":  # its own angles are left to its own code, which skips some layers
        pairs = zip(rotations, stock.no_rope_layers, strict=False)  # the list may be longer
        rotations = [rope if rope and (rotates or not rope.keeps_stock_rotation()) else None for rope, rotates in pairs]
    rope = common_rotation(rotations)
    head = variant.head.removeprefix(CLASS_PREFIXES[variant.model_type])
    if head not in HEADS:
        raise NoStockEqual(f"smollm3 has no {variant.head}")
    if rope is not None and rope.partial_rotary_factor != 1.0:
        raise NoStockEqual("smollm3 rotates whole heads")
    names = {name: name for name in FIELDS if hasattr(stock, name)}
    fields = common_fields(stock, names) | _window_fields(stock)
    has_bias = getattr(stock, "attention_bias", False) or variant.model_type == "qwen2"
    parameters = (
        {"rope_type": "default", "rope_theta": 10000.0} if rope is None else rope_parameters(rope, partial=False)
    )
    config = SmolLM3Config(
        **fields,
        head_dim=variant.shape.head_size,
        attention_bias=has_bias,
        mlp_bias=getattr(stock, "mlp_bias", False),
        no_rope_layers=[int(rotation is not None) for rotation in rotations],
        rope_parameters=parameters,
        architectures=[f"SmolLM3{head}"],
    )
    plan = ExportPlan(config, f"SmolLM3{head}", variant.head, names=scheme_names(variant))
    if rope is not None and rope.layout == "interleaved":
        plan.transforms = reordered_heads(variant, "interleaved_to_halves", rope, ["q_", "k_"])
    if variant.model_type == "qwen2":  # has no bias after attention; SmolLM3 has one everywhere or nowhere
        for layer in range(variant.shape.num_layers):
            weight = f"{variant.attention_path(layer)}.o_proj.weight"
            plan.added[f"{variant.attention_path(layer)}.o_proj.bias"] = partial(_zero_bias, variant, weight)
    config.max_position_embeddings = rotary_length(rope, stock.max_position_embeddings, max_positions)
    plan.notes += length_notes(rope, stock.max_position_embeddings)
    if config.no_rope_layers != [int((layer + 1) % 4 != 0) for layer in range(len(rotations))]:
        plan.notes.append(
            "llama.cpp skips the rotation of SmolLM3 in every fourth layer, whatever config.json says: a GGUF of this "
            "checkpoint would be wrong"
        )
    plan.checked_position = stock.max_position_embeddings + 3
    return plan


def _zero_bias(variant: Variant, weight: str) -> torch.Tensor:
    stored = variant.tensors[variant.stored_names[weight]]
    return torch.zeros(len(stored), dtype=stored.dtype)


def _window_fields(stock: Any) -> dict[str, Any]:
    """The sliding window of each layer. Mistral has one in all layers, Qwen2 in those that `layer_types` names."""
    window = getattr(stock, "sliding_window", None)
    layer_types = getattr(stock, "layer_types", None)
    if layer_types is None:
        layer_types = ["sliding_attention" if window else "full_attention"] * stock.num_hidden_layers
    if not window or "sliding_attention" not in layer_types:
        return {"layer_types": ["full_attention"] * stock.num_hidden_layers}
    return {"use_sliding_window": True, "sliding_window": window, "layer_types": list(layer_types)}


SMOLLM3 = Exporter(
    target="smollm3",
    accepts="`rope` in some layers and nothing in the others, or `none`",
    applies=lambda variant: variant.model_type in CLASS_PREFIXES,
    plan=_plan,
)
