"""The supported model families: one record each."""

from __future__ import annotations

from typing import Any

import torch
from transformers.configuration_utils import PreTrainedConfig

from hf_posenc.attention import token_like
from hf_posenc.errors import PosEncError
from hf_posenc.model_types import ALIASES, VARIANT_PREFIX

from .architecture import Architecture


def fill_token_types(inputs: dict[str, Any]) -> None:
    """Supply token types: without them, BERT's embeddings read a buffer as long as the trained length."""
    if inputs.get("token_type_ids") is None:
        inputs["token_type_ids"] = torch.zeros_like(token_like(inputs), dtype=torch.long)


def _check_gpt2_config(config: PreTrainedConfig) -> None:
    if config.reorder_and_upcast_attn:
        raise PosEncError(
            "reorder_and_upcast_attn=True computes attention outside transformers' attention interface, where no "
            "position scheme can act; set it to False"
        )


def _bert_like(model_type: str, **fields: Any) -> Architecture:
    """An encoder, or decoder, with the modules of BERT."""
    defaults = {
        "layers": "encoder.layer",
        "self_attention": "attention.self",
        "cross_attention": "crossattention.self",
        "table": "embeddings.position_embeddings",
        "constant": "embeddings.token_type_embeddings",
        "is_causal": lambda config: getattr(config, "is_decoder", False),
        "fill_inputs": fill_token_types,
    }
    return Architecture(model_type=model_type, **{**defaults, **fields})


def _roberta_like(model_type: str) -> Architecture:
    """Positions, and so position_ids, are counted from the padding token's id on."""

    def after_padding(config: PreTrainedConfig) -> int:
        return config.pad_token_id + 1

    return _bert_like(model_type, first_row=after_padding, first_position=after_padding)


def _rotates_where_sliding(attention: Any) -> bool:
    """Full attention has no positions where other layers have a window."""
    return attention.sliding_window is None or attention.is_sliding


_RECORDS = [
    _bert_like("bert"),
    _bert_like("electra"),
    _bert_like("ernie"),
    _bert_like(
        "albert",
        layers="encoder.albert_layer_groups",
        self_attention="albert_layers.0.attention",
        cross_attention=None,
        num_layers="num_hidden_groups",
    ),
    _bert_like(
        "distilbert",
        layers="transformer.layer",
        self_attention="attention",
        cross_attention=None,
        constant=None,
        fill_inputs=None,
    ),
    _roberta_like("roberta"),
    _roberta_like("roberta-prelayernorm"),
    _roberta_like("xlm-roberta"),
    _roberta_like("xlm-roberta-xl"),
    _roberta_like("camembert"),
    _roberta_like("data2vec-text"),
    Architecture(
        model_type="opt",
        base_name="OPTDecoder",
        table="embed_positions",
        first_row=lambda config: 2,
        extra_rows=2,
        scales_queries=True,
    ),
    Architecture(model_type="biogpt", table="embed_positions", first_row=lambda config: 2, extra_rows=2),
    Architecture(model_type="gpt_bigcode", layers="h", self_attention="attn", table="wpe"),
    Architecture(model_type="gpt2", layers="h", self_attention="attn", table="wpe", check_config=_check_gpt2_config),
    Architecture(model_type="llama"),
    Architecture(model_type="mistral"),
    Architecture(model_type="mixtral"),
    Architecture(model_type="qwen2"),
    Architecture(model_type="qwen2_moe"),
    Architecture(model_type="qwen3"),
    Architecture(model_type="qwen3_moe"),
    Architecture(model_type="gemma"),
    Architecture(model_type="olmo"),
    Architecture(model_type="olmo2"),
    Architecture(model_type="olmoe"),
    Architecture(model_type="phi"),
    Architecture(model_type="phi3"),
    Architecture(model_type="phimoe"),
    Architecture(model_type="granite"),
    Architecture(model_type="granitemoe"),
    Architecture(model_type="starcoder2"),
    Architecture(model_type="seed_oss"),
    Architecture(model_type="apertus"),
    Architecture(model_type="arcee"),
    Architecture(model_type="persimmon"),
    Architecture(model_type="gemma2"),
    Architecture(model_type="gemma3_text"),
    Architecture(model_type="olmo3"),
    Architecture(model_type="smollm3", rotates=lambda attention: attention.use_rope),
    Architecture(model_type="cohere", interleaved=True),
    Architecture(
        model_type="cohere2", interleaved=True, rotates=lambda attention: attention.sliding_window is not None
    ),
    Architecture(model_type="exaone4", rotates=_rotates_where_sliding),
    Architecture(model_type="glm", interleaved=True),
    Architecture(model_type="glm4", interleaved=True),
    Architecture(model_type="helium", interleaved=True),
    Architecture(model_type="ernie4_5", interleaved=True),
    Architecture(model_type="nanochat", reversed_rotation=True),
    Architecture(model_type="stablelm", layers_drop_kwargs=True),
    Architecture(model_type="gpt_oss", angle_per_pair=True, has_sinks=True),
    Architecture(model_type="nemotron", layers_drop_kwargs=True),
    Architecture(model_type="gpt_neox", self_attention="attention"),
    Architecture(model_type="modernbert", self_attention="attn", is_causal=lambda config: False),
    Architecture(model_type="modernbert-decoder", self_attention="attn"),
    Architecture(model_type="eurobert", is_causal=lambda config: False),
    Architecture(model_type="nomic_bert", is_causal=lambda config: False),
    Architecture(model_type="jina_embeddings_v3", is_causal=lambda config: False),
    Architecture(model_type="gte", is_causal=lambda config: False),
    Architecture(model_type="cwm"),
    Architecture(model_type="glm4_moe"),
    Architecture(model_type="granitemoeshared"),
    Architecture(model_type="hy_v3"),
    Architecture(model_type="hyperclovax"),
    Architecture(model_type="jais2"),
    Architecture(model_type="jetmoe", self_attention="self_attention"),
    Architecture(model_type="diffllama"),
    Architecture(model_type="mellum"),
    Architecture(model_type="minimax_m2"),
    Architecture(model_type="solar_open"),
    Architecture(model_type="dots1"),
    Architecture(model_type="ministral"),
    Architecture(model_type="vaultgemma"),
    Architecture(model_type="afmoe", rotates=lambda attention: attention.is_local_attention),
    Architecture(
        model_type="cohere2_moe",
        interleaved=True,
        rotates=lambda attention: attention.sliding_window is not None or attention.force_rope,
    ),
    Architecture(model_type="exaone_moe", rotates=_rotates_where_sliding),
    Architecture(model_type="kolibri1", rotates=_rotates_where_sliding),
    Architecture(model_type="qwen2_vl_text", position_axes=3),
    Architecture(model_type="qwen2_5_vl_text", position_axes=3),
    Architecture(model_type="qwen3_vl_text", position_axes=3),
    Architecture(model_type="qwen3_vl_moe_text", position_axes=3),
]
ARCHITECTURES = {record.model_type: record for record in _RECORDS}
"""The supported architectures by stock `model_type`."""
ARCHITECTURES.update({alias: ARCHITECTURES[model_type] for alias, model_type in ALIASES.items()})


def find_architecture(config: PreTrainedConfig) -> Architecture | None:
    """The architecture of a config, stock or variant; None if it is not supported."""
    return ARCHITECTURES.get(getattr(config, "model_type", "").removeprefix(VARIANT_PREFIX))


def max_positions(config: PreTrainedConfig) -> int:
    """The number of positions that a model was trained with: RoBERTa has 512 for `max_position_embeddings` of 514."""
    architecture = find_architecture(config)
    return config.max_position_embeddings if architecture is None else architecture.shape(config).max_positions
