"""BERT with a position table and a shared T5 bias: MPNet."""

from __future__ import annotations

import torch
from transformers import MPNetConfig

from ..loading import load_tokenizer
from .bert import HeadTable, encoder_fields, find_head, score_scheme
from .plan import Exporter, ExportPlan
from .position_table import added_rows, default_positions
from .variant import HEAD, MERGED, NoStockEqual, Rules, Variant

NUM_BUCKETS, MAX_DISTANCE = 32, 128
"""Fixed in MPNet's code."""
FIRST_ROW, PADDING = 2, 1
"""The row of MPNet's table for position 0, and the token that it takes for padding, whatever its config says."""
BASE: Rules = {
    r"^embeddings\.(token_type|position)_embeddings\.": MERGED,
    r"\.attention\.self\.query\.": ".attention.attn.q.",
    r"\.attention\.self\.key\.": ".attention.attn.k.",
    r"\.attention\.self\.value\.": ".attention.attn.v.",
    r"\.attention\.output\.dense\.": ".attention.attn.o.",
    r"\.attention\.output\.LayerNorm\.": ".attention.LayerNorm.",
}
MASKED_LM: Rules = {
    r"^cls\.seq_relationship\.": None,
    r"^cls\.predictions\.transform\.dense\.": "lm_head.dense.",
    r"^cls\.predictions\.transform\.LayerNorm\.": "lm_head.layer_norm.",
    r"^cls\.predictions\.": "lm_head.",
}
HEADS: HeadTable = {
    "BertModel": ("MPNetModel", {}),
    "BertForMaskedLM": ("MPNetForMaskedLM", MASKED_LM),
    "BertForSequenceClassification": ("MPNetForSequenceClassification", {r"^classifier\.": "classifier.out_proj."}),
    "BertForTokenClassification": ("MPNetForTokenClassification", {}),
    "BertForQuestionAnswering": ("MPNetForQuestionAnswering", {}),
}


def _plan(variant: Variant, max_positions: int | None) -> ExportPlan:
    _, t5 = score_scheme(variant, "t5")
    options = t5.options
    if (options.num_buckets, options.max_distance) != (NUM_BUCKETS, MAX_DISTANCE) or not t5.bidirectional:
        raise NoStockEqual(f"mpnet has {NUM_BUCKETS} buckets for both directions, up to a distance of {MAX_DISTANCE}")
    if t5.table is None:
        raise NoStockEqual("mpnet has one bias for all layers; t5 has one per layer here (shared=false)")
    variant_class, model_class, head = find_head(variant, HEADS, "mpnet")
    stock, fields = encoder_fields(variant)
    if variant_class == "BertForMaskedLM" and stock.hidden_act != "gelu":
        raise NoStockEqual(f"mpnet's masked-LM head has the activation gelu, not {stock.hidden_act}")
    tokenizer = load_tokenizer(variant.directory)
    if tokenizer is not None and PADDING in set(tokenizer.all_special_ids) - {tokenizer.pad_token_id}:
        token = tokenizer.convert_ids_to_tokens(PADDING)
        raise NoStockEqual(f"mpnet takes token id {PADDING} for padding, and the tokenizer uses it for {token!r}")
    num_positions = max_positions or default_positions(variant)
    rows = added_rows(variant, num_positions)
    fields |= {"max_position_embeddings": num_positions + FIRST_ROW, "relative_attention_num_buckets": NUM_BUCKETS}
    config = MPNetConfig(**fields, architectures=[model_class])
    plan = ExportPlan(config, model_class, variant_class, max_positions=num_positions)
    pooler = {"MPNetModel": "pooler.dense.", "MPNetForSequenceClassification": f"{HEAD}classifier.dense."}
    base = {**BASE, r"^pooler\.dense\.": pooler.get(model_class)}
    plan.names, plan.left_out = variant.rename(base, "mpnet.", head)
    token_type = variant.read(f"{variant.prefix}embeddings.token_type_embeddings.weight").float()[0]
    table = torch.cat([torch.zeros(FIRST_ROW, rows.shape[1]), rows + token_type])
    prefix = "mpnet." if variant.prefix else ""
    plan.added[f"{prefix}embeddings.position_embeddings.weight"] = lambda: table
    bias = t5.table.weight.detach().clone()
    plan.added[f"{prefix}encoder.relative_attention_bias.weight"] = lambda: bias
    plan.notes.append(
        f"MPNet has no token types: every token is of type 0. It reads token id {PADDING} as padding, whatever the "
        "tokenizer pads with"
    )
    return plan


MPNET = Exporter(
    target="mpnet",
    accepts="`t5` with its default buckets, alone or with schemes that add to the input (such as `learned`)",
    applies=lambda variant: variant.model_type == "bert",
    plan=_plan,
)
