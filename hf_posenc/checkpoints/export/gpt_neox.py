"""GPT-2 with `rope`: GPT-NeoX with a sequential residual stream."""

from __future__ import annotations

from functools import partial

import torch
from transformers import GPTNeoXConfig

from ..weights import rotary_feature_order
from .plan import Exporter, ExportPlan, common_fields
from .rotations import layer_rotations, length_notes, rope_parameters, rotary_length, rotation_of_all_layers
from .variant import NoStockEqual, Rules, Variant

BASE: Rules = {
    r"^wte\.": "embed_in.",
    r"^h\.": "layers.",
    r"^ln_f\.": "final_layer_norm.",
    r"\.ln_1\.": ".input_layernorm.",
    r"\.ln_2\.": ".post_attention_layernorm.",
    r"\.attn\.c_attn\.": ".attention.query_key_value.",
    r"\.attn\.c_proj\.": ".attention.dense.",
    r"\.mlp\.c_fc\.": ".mlp.dense_h_to_4h.",
    r"\.mlp\.c_proj\.": ".mlp.dense_4h_to_h.",
}
DEFAULT_THETA = 10000.0
OUTPUT = "embed_out.weight"
"""The name of the output layer in files; some releases of transformers rename it when they load it."""
HEADS: dict[str, tuple[str, Rules]] = {
    "GPT2Model": ("GPTNeoXModel", {}),
    "GPT2LMHeadModel": ("GPTNeoXForCausalLM", {r"^lm_head\.weight$": OUTPUT}),
    "GPT2ForSequenceClassification": ("GPTNeoXForSequenceClassification", {}),
    "GPT2ForTokenClassification": ("GPTNeoXForTokenClassification", {}),
    "GPT2ForQuestionAnswering": ("GPTNeoXForQuestionAnswering", {}),
}
FIELDS = {
    "n_embd": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "activation_function": "hidden_act",
    "layer_norm_epsilon": "layer_norm_eps",
    "attn_pdrop": "attention_dropout",
    "resid_pdrop": "hidden_dropout",
}


def _plan(variant: Variant, max_positions: int | None) -> ExportPlan:
    stock, rope = variant.stock_config(), rotation_of_all_layers(layer_rotations(variant.plan))
    if variant.head not in HEADS:
        raise NoStockEqual(f"gpt_neox has no {variant.head}")
    if stock.scale_attn_by_inverse_layer_idx or not stock.scale_attn_weights:
        raise NoStockEqual("gpt_neox scales attention by 1 / sqrt(head size) in every layer")
    if stock.add_cross_attention:
        raise NoStockEqual("gpt_neox has no cross-attention")
    model_class, head = HEADS[variant.head]
    config = GPTNeoXConfig(
        **common_fields(stock, FIELDS) | {"tie_word_embeddings": False},
        intermediate_size=stock.n_inner or 4 * stock.n_embd,
        max_position_embeddings=rotary_length(rope, stock.n_positions, max_positions),
        use_parallel_residual=False,
        rope_parameters=rope_parameters(rope, partial=True),
        rotary_pct=rope.partial_rotary_factor,
        architectures=[model_class],
    )
    # Read by older releases of transformers, and by tools that follow them.
    config.rotary_pct, config.rotary_emb_base = rope.partial_rotary_factor, rope.rope_parameters["rope_theta"]
    plan = ExportPlan(config, model_class, variant.head)
    plan.names, plan.left_out = variant.rename(BASE, "gpt_neox.", head)
    order = list(range(variant.shape.head_size))
    if rope.layout == "interleaved":
        order = rotary_feature_order("interleaved_to_halves", variant.shape.head_size, rope.rotary_size)
    for name, parameter in variant.model_names.items():
        if ".attn.c_attn." in parameter:
            plan.transforms[name] = partial(_by_head, order=order, num_heads=stock.n_head)
        elif parameter.endswith((".c_proj.weight", ".c_fc.weight")):
            plan.transforms[name] = torch.t
    embedding = f"{variant.prefix}wte.weight"
    if model_class == "GPTNeoXForCausalLM" and OUTPUT not in plan.names.values():
        plan.added[OUTPUT] = partial(variant.read, embedding)  # tied in GPT-2; not every tool ties GPT-NeoX's
    plan.notes += length_notes(rope, stock.n_positions)
    if rope.rope_parameters != {"rope_type": "default", "rope_theta": DEFAULT_THETA}:
        plan.notes.append(
            "llama.cpp rotates GPT-NeoX by default angles, whatever config.json says: a GGUF of this checkpoint would "
            "be wrong"
        )
    plan.checked_position = stock.n_positions + 3
    return plan


def _by_head(fused: torch.Tensor, order: list[int], num_heads: int) -> torch.Tensor:
    """GPT-2's columns (all queries, all keys, all values) as GPT-NeoX's rows, grouped by head, in its rotary order."""
    rows = torch.t(fused).unflatten(0, (3, num_heads, -1))
    rows = torch.cat([rows[:2, :, order], rows[2:]])
    return rows.transpose(0, 1).flatten(0, 2)


GPT_NEOX = Exporter(
    target="gpt_neox",
    accepts="`rope` in all layers, with any theta, scaling, layout and partial_rotary_factor",
    applies=lambda variant: variant.model_type == "gpt2",
    plan=_plan,
)
