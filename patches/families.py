"""The supported model families: one record each."""

from __future__ import annotations

from typing import Any

import torch

from hf_posenc.attention import token_like
from hf_posenc.errors import PosEncError

from .architecture import Architecture


def _fill_token_types(inputs: dict[str, Any]) -> None:
    # Without token types, BERT's embeddings read a buffer as long as the trained length.
    if inputs.get("token_type_ids") is None:
        inputs["token_type_ids"] = torch.zeros_like(token_like(inputs), dtype=torch.long)


def _check_gpt2_config(config: Any) -> None:
    if config.reorder_and_upcast_attn:
        raise PosEncError(
            "reorder_and_upcast_attn=True computes attention outside transformers' attention interface, where no "
            "position scheme can act; set it to False"
        )


_RECORDS = [
    Architecture(
        model_type="bert",
        layers="encoder.layer",
        self_attention="attention.self",
        cross_attention="crossattention.self",
        table="embeddings.position_embeddings",
        constant="embeddings.token_type_embeddings",
        is_causal=lambda config: config.is_decoder,
        fill_inputs=_fill_token_types,
    ),
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
    Architecture(
        model_type="exaone4", rotates=lambda attention: attention.sliding_window is None or attention.is_sliding
    ),
    Architecture(model_type="glm", interleaved=True),
    Architecture(model_type="glm4", interleaved=True),
    Architecture(model_type="helium", interleaved=True),
    Architecture(model_type="ernie4_5", interleaved=True),
    Architecture(model_type="nanochat"),
    Architecture(model_type="stablelm"),
    Architecture(model_type="gpt_oss"),
    Architecture(model_type="nemotron"),
    Architecture(model_type="gpt_neox", self_attention="attention"),
    Architecture(model_type="modernbert", self_attention="attn", is_causal=lambda config: False),
    Architecture(model_type="modernbert-decoder", self_attention="attn"),
    Architecture(model_type="eurobert", is_causal=lambda config: False),
    Architecture(model_type="nomic_bert", is_causal=lambda config: False),
    Architecture(model_type="jina_embeddings_v3", is_causal=lambda config: False),
    Architecture(model_type="gte", is_causal=lambda config: False),
]
ARCHITECTURES = {record.model_type: record for record in _RECORDS}
"""The supported architectures by stock `model_type`."""
