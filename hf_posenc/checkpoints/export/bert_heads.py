"""What the exports of BERT share: the fields of its config, and its heads."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig

from .plan import common_fields
from .variant import NoStockEqual, Rules, Variant

FIELDS = (
    *("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "hidden_act"),
    *("hidden_dropout_prob", "attention_probs_dropout_prob", "max_position_embeddings", "layer_norm_eps"),
)
MASKED_LM: Rules = {r"^cls\.seq_relationship\.": None}
HeadTable = dict[str, tuple[str, Rules]]
"""By BERT's class, the target's class and the rules for the names of the head."""


def find_head(variant: Variant, heads: HeadTable, target: str) -> tuple[str, str, Rules]:
    """The class to load the variant with, the class of the target, and the rules for the names of its head."""
    head = "BertForMaskedLM" if variant.head == "BertForPreTraining" else variant.head
    if head not in heads:
        raise NoStockEqual(
            f"{target} has no head that equals {variant.head}; save the variant with another, such as BertModel"
        )
    return head, *heads[head]


def encoder_fields(variant: Variant) -> tuple[PreTrainedConfig, dict[str, Any]]:
    """The stock config, and the fields of it that other encoders have too. Raises `NoStockEqual` for a decoder."""
    stock = variant.stock_config()
    if stock.is_decoder or stock.add_cross_attention:
        raise NoStockEqual("only encoders can be exported")
    return stock, common_fields(stock, {name: name for name in FIELDS})
