"""BERT with `deberta`, in the forms of v1, v2 and v3: DeBERTa-v2 with separate projections of positions.

The scheme has two numbers per head, a factor for the content and one for the positions. DeBERTa does not, so they go
into its projections. The table is stored normalized.
"""

from __future__ import annotations

import math
from functools import partial

import torch
from transformers import DebertaV2Config

from ...schemes.deberta import DebertaOptions
from .bert import MASKED_LM, HeadTable, encoder_fields, find_head, score_scheme
from .plan import Exporter, ExportPlan, per_head
from .position_table import added_rows, default_positions
from .variant import HEAD, MERGED, NoStockEqual, Rules, Variant

BASE: Rules = {
    r"^embeddings\.position_embeddings\.": MERGED,
    r"\.attention\.self\.(query|key|value)\.": r".attention.self.\1_proj.",
}
HEADS: HeadTable = {
    "BertModel": ("DebertaV2Model", {}),
    "BertForMaskedLM": ("DebertaV2ForMaskedLM", MASKED_LM),
    "BertForSequenceClassification": ("DebertaV2ForSequenceClassification", {}),
    "BertForTokenClassification": ("DebertaV2ForTokenClassification", {}),
    "BertForQuestionAnswering": ("DebertaV2ForQuestionAnswering", {}),
}


def _plan(variant: Variant, max_positions: int | None) -> ExportPlan:
    index, scheme = score_scheme(variant, "deberta")
    variant_class, model_class, head = find_head(variant, HEADS, "deberta-v2")
    stock, fields = encoder_fields(variant)
    options, has_table = scheme.options, bool(variant.plan.state.at_embedding)
    num_positions = max_positions or default_positions(variant)
    config = DebertaV2Config(
        **fields | {"max_position_embeddings": num_positions},
        type_vocab_size=stock.type_vocab_size,
        relative_attention=True,
        position_biased_input=has_table,
        pos_att_type=list(options.terms),
        position_buckets=options.buckets or -1,
        max_relative_positions=options.max_distance,
        share_att_key=False,
        norm_rel_ebd="none",
        pooler_hidden_act="tanh",
        architectures=[model_class],
    )
    plan = ExportPlan(config, model_class, variant_class, max_positions=num_positions if has_table else None)
    is_classifier = model_class.endswith("SequenceClassification")
    base = {**BASE, r"^pooler\.": f"{HEAD}pooler." if is_classifier else None}
    plan.names, plan.left_out = variant.rename(base, "deberta.", head)
    prefix = "deberta." if variant.prefix else ""
    if has_table:
        rows = added_rows(variant, num_positions)
        plan.added[f"{prefix}embeddings.position_embeddings.weight"] = lambda: rows
    with torch.no_grad():
        table = scheme.norm(scheme.table) if options.norm else scheme.table.detach().clone()
    plan.added[f"{prefix}encoder.rel_embeddings.weight"] = lambda: table
    for layer in range(variant.shape.num_layers):
        parameters = f"{variant.attention_path(layer)}.position_scheme.{index}."
        _plan_layer(plan, variant, options, layer, parameters, f"{prefix}encoder.layer.{layer}.attention.self.")
    return plan


def _plan_layer(
    plan: ExportPlan, variant: Variant, options: DebertaOptions, layer: int, parameters: str, target: str
) -> None:
    """Scale the queries of a layer, and add its projections of positions."""
    path = variant.attention_path(layer)
    gain = variant.read(f"{parameters}position_gain").float()
    # DeBERTa divides by sqrt(1 + terms); the content's factor goes into the queries, which the keys of positions undo.
    scale = (1 + variant.read(f"{parameters}content_change").float()) * math.sqrt(1 + len(options.terms))
    if (scale == 0).any():
        raise NoStockEqual(f"a head of layer {layer} ignores the content (content_change = -1)")
    for name in ("query.weight", "query.bias"):
        plan.transforms[variant.stored_names[f"{path}.{name}"]] = partial(per_head, factors=scale)
    for term, name, factors in (("c2p", "key", gain / scale), ("p2c", "query", gain)):
        if term not in options.terms:
            continue
        shared = options.share_projections
        weight = f"{path}.{name}.weight" if shared else f"{parameters}{name}_projection"
        bias = f"{path}.{name}.bias" if shared else f"{parameters}{name}_bias"
        plan.added[f"{target}pos_{name}_proj.weight"] = partial(_scaled, variant, weight, factors)
        plan.added[f"{target}pos_{name}_proj.bias"] = partial(_scaled, variant, bias, factors)


def _scaled(variant: Variant, parameter: str, factors: torch.Tensor) -> torch.Tensor:
    if parameter not in variant.stored_names:  # projections of position keys have no bias
        return torch.zeros(variant.shape.num_heads * variant.shape.head_size)
    return per_head(variant.read(parameter), factors)


DEBERTA_V2 = Exporter(
    target="deberta-v2",
    accepts="`deberta` in all layers, alone or with schemes that add to the input (such as `learned`)",
    applies=lambda variant: variant.model_type == "bert",
    plan=_plan,
)
