"""BERT with `rope`: RoFormer, with its table of sines and cosines written out."""

from __future__ import annotations

import torch
from transformers import RoFormerConfig

from ...errors import PosEncError
from .bert import MASKED_LM, HeadTable, encoder_fields, find_head
from .plan import Exporter, ExportPlan
from .rotations import depends_on_length, layer_rotations, reordered_heads, rotation_of_all_layers, rotation_table
from .variant import NoStockEqual, Rules, Variant

BASE: Rules = {r"^pooler\.": None}
HEADS: HeadTable = {
    "BertModel": ("RoFormerModel", {}),
    "BertForMaskedLM": ("RoFormerForMaskedLM", MASKED_LM),
    "BertForTokenClassification": ("RoFormerForTokenClassification", {}),
    "BertForQuestionAnswering": ("RoFormerForQuestionAnswering", {}),
}


def _plan(variant: Variant, max_positions: int | None) -> ExportPlan:
    rope = rotation_of_all_layers(layer_rotations(variant.plan))
    if depends_on_length(rope):
        raise NoStockEqual(
            f"roformer has one table of angles, and {rope.rope_type} scaling changes them with the length"
        )
    variant_class, model_class, head = find_head(variant, HEADS, "roformer")
    stock, fields = encoder_fields(variant)
    num_positions = stock.max_position_embeddings if max_positions is None else max_positions
    if num_positions < 1:
        raise PosEncError(f"max_positions must be at least 1, got {num_positions}")
    fields |= {"max_position_embeddings": num_positions, "type_vocab_size": stock.type_vocab_size}
    config = RoFormerConfig(**fields, architectures=[model_class])
    plan = ExportPlan(config, model_class, variant_class, max_positions=num_positions)
    plan.names, plan.left_out = variant.rename(BASE, "roformer.", head)
    if rope.layout == "halves":
        plan.transforms = reordered_heads(variant, "halves_to_interleaved", rope, ["query.", "key."])
    prefix = "roformer." if variant.prefix else ""
    plan.added[f"{prefix}encoder.embed_positions.weight"] = lambda: torch.cat(
        rotation_table(rope, num_positions), dim=1
    )
    return plan


ROFORMER = Exporter(
    target="roformer",
    accepts="`rope` in all layers, with any theta, fixed scaling, layout and partial_rotary_factor",
    applies=lambda variant: variant.model_type == "bert",
    plan=_plan,
)
