"""What the exports of BERT share: the fields of its config, its heads, and the scheme inside attention."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig

from ...schemes.base import LAYER_SEAMS, STOCK_ROTATION
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


def score_scheme(variant: Variant, name: str) -> tuple[int, Any]:
    """The only scheme inside attention, and its index. Raises `NoStockEqual` unless it is this one, in all layers."""
    seams = (*LAYER_SEAMS, STOCK_ROTATION)
    by_layer = [{index for seam in seams for index in active[seam]} for active in variant.plan.state.active]
    acting = sorted(set().union(*by_layer))
    if len(acting) != 1:
        raise NoStockEqual("several schemes act inside attention" if acting else "no scheme acts inside attention")
    scheme = variant.schemes[acting[0]]
    if scheme.name != name:
        raise NoStockEqual(f"{scheme.name} acts inside attention, not {name}")
    if not all(by_layer):
        raise NoStockEqual(f"{name} acts in some layers only")
    return acting[0], scheme
