"""LLaMA with a rotation of a part of each head: Phi-3, which fuses projections and has no biases."""

from __future__ import annotations

from functools import partial

import torch
from transformers import Phi3Config

from ..weights import Transform
from .plan import Exporter, ExportPlan, common_fields
from .rotations import layer_rotations, reordered_heads, rope_parameters, rotation_of_all_layers
from .same_rotation import scheme_names
from .variant import NoStockEqual, Variant

HEADS = ("Model", "ForCausalLM", "ForSequenceClassification", "ForTokenClassification")
FIELDS = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    *("hidden_act", "max_position_embeddings", "rms_norm_eps", "attention_dropout"),
)
FUSED = {
    "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
}
"""Projections of a Phi-3 layer, and those of LLaMA whose rows they hold one after the other."""


def _plan(variant: Variant, max_positions: int | None) -> ExportPlan:
    rope = rotation_of_all_layers(layer_rotations(variant.plan))
    stock, head = variant.stock_config(), variant.head.removeprefix("Llama")
    if head not in HEADS:
        raise NoStockEqual(f"phi3 has no {variant.head}")
    if rope.rope_type != "default":
        raise NoStockEqual(f"phi3 is exported without scaling, not with {rope.rope_type!r}")
    if stock.attention_bias or stock.mlp_bias:
        raise NoStockEqual("phi3 has no biases")
    config = Phi3Config(
        **common_fields(stock, {name: name for name in FIELDS}),
        head_dim=variant.shape.head_size,
        sliding_window=None,
        rope_parameters=rope_parameters(rope, partial=True),
        architectures=[f"Phi3{head}"],
    )
    if max_positions is not None:
        config.max_position_embeddings = max_positions
    plan = ExportPlan(config, f"Phi3{head}", variant.head, names=scheme_names(variant))
    reorder = rope.layout == "interleaved"
    orders = reordered_heads(variant, "interleaved_to_halves", rope, ["q_", "k_"]) if reorder else {}
    for layer in range(variant.shape.num_layers):
        path = f"{variant.prefix}{variant.architecture.layers}.{layer}"
        for fused, pieces in FUSED.items():
            parameters = [f"{path}.{piece}.weight" for piece in pieces]
            plan.names |= dict.fromkeys([variant.stored_names[parameter] for parameter in parameters])
            plan.added[f"{path}.{fused}.weight"] = partial(_fuse, variant, parameters, orders)
    plan.checked_position = config.max_position_embeddings + 3
    return plan


def _fuse(variant: Variant, parameters: list[str], orders: dict[str, Transform]) -> torch.Tensor:
    """The rows of several projections, with rotary features reordered where `orders` says so."""
    weights = []
    for parameter in parameters:
        weight, order = variant.read(parameter), orders.get(variant.stored_names[parameter])
        weights.append(weight if order is None else order(weight))
    return torch.cat(weights)


PHI3 = Exporter(
    target="phi3",
    accepts="`rope` in all layers, on a part of each head, without scaling",
    applies=lambda variant: variant.model_type == "llama",
    plan=_plan,
)
