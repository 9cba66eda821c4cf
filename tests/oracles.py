"""What a scheme must equal: the stock model, given the position signal by code of transformers that is not ours.

A score term goes into the stock model as a 4D attention mask; a rotation through an attention function that calls
LLaMA's or RoFormer's own rotary code; an embedding as the stock table. Everything else is the stock forward.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

import tiny
import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.bloom.modeling_bloom import build_alibi_tensor
from transformers.models.distilbert.modeling_distilbert import create_sinusoidal_embeddings
from transformers.models.llama import modeling_llama
from transformers.models.t5.configuration_t5 import T5Config
from transformers.models.t5.modeling_t5 import T5Attention


def silent_stock(architecture: str) -> Any:
    """The stock model with its own positions taken away by its weights: a table of zeros, angles of zero."""
    model = tiny.model(architecture)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("wpe.weight", "position_embeddings.weight")):
                parameter.zero_()
    if architecture == "llama":
        model.model.rotary_emb.inv_freq.zero_()
    model.set_attn_implementation("eager")
    return model


def causal_mask(architecture: str, length: int) -> torch.Tensor:
    visible = torch.ones(1, 1, length, length, dtype=torch.bool)
    return tiny.additive(visible if architecture == "bert" else visible.tril())


def with_bias(architecture: str, ids: torch.Tensor, bias: torch.Tensor) -> Any:
    """The stock model's logits with a bias (1, H, n, n) on its attention scores."""
    model = silent_stock(architecture)
    mask = (causal_mask(architecture, ids.shape[1]) + bias).clamp(min=torch.finfo(torch.float64).min)
    return model, model(ids, attention_mask=mask.expand(ids.shape[0], -1, -1, -1)).logits


def bloom_alibi(heads: int, length: int) -> torch.Tensor:
    """BLOOM's slopes, read off its own bias, on the distances. BLOOM's bias is slope times key place."""
    by_key = build_alibi_tensor(torch.ones(1, 2), heads, torch.float64)
    slopes = by_key.view(heads, 2)[:, 1]
    places = torch.arange(length, dtype=torch.float64)
    return -slopes.view(1, -1, 1, 1) * (places[None, :] - places[:, None]).abs()


def t5_attention(heads: int, buckets: int, max_distance: int, bidirectional: bool) -> T5Attention:
    config = T5Config(
        d_model=tiny.WIDTH,
        d_kv=8,
        num_heads=heads,
        relative_attention_num_buckets=buckets,
        relative_attention_max_distance=max_distance,
        is_decoder=not bidirectional,
    )
    return T5Attention(config, has_relative_attention_bias=True, layer_idx=0).to(torch.float64)


def distilbert_table(length: int) -> torch.Tensor:
    table = torch.empty(length, tiny.WIDTH)
    create_sinusoidal_embeddings(n_pos=length, dim=tiny.WIDTH, out=table)
    return table.detach().to(torch.float64)


@contextlib.contextmanager
def rotating_attention(architecture: str, length: int) -> Iterator[Any]:
    """The stock model, its queries and keys turned by LLaMA's own rotary functions inside a registered function."""
    stock = {"gpt2": "gpt2", "llama": "llama"}.get(architecture, "bert")
    module = __import__(f"transformers.models.{stock}.modeling_{stock}", fromlist=["eager_attention_forward"])
    rotary = modeling_llama.LlamaRotaryEmbedding(tiny.config("llama"))
    cosines, sines = rotary(torch.zeros(1, dtype=torch.float64), torch.arange(length)[None])

    def attention(attending: Any, query: Any, key: Any, value: Any, mask: Any, **kwargs: Any) -> Any:
        query, key = modeling_llama.apply_rotary_pos_emb(query, key, cosines, sines)
        return module.eager_attention_forward(attending, query, key, value, mask, **kwargs)

    ALL_ATTENTION_FUNCTIONS.register("oracle_rotation", attention)
    model = silent_stock(architecture)
    model.config._attn_implementation = "oracle_rotation"
    try:
        yield model
    finally:
        ALL_ATTENTION_FUNCTIONS._global_mapping.pop("oracle_rotation")


def embedded(architecture: str, ids: torch.Tensor, table: torch.Tensor) -> Any:
    """The stock model with a table of position vectors added to its word embeddings."""
    model = silent_stock(architecture)
    if architecture == "llama":
        words = model.get_input_embeddings()(ids)
        return model, model(inputs_embeds=words + table[: ids.shape[1]]).logits
    own = model.transformer.wpe if architecture == "gpt2" else model.bert.embeddings.position_embeddings
    with torch.no_grad():
        own.weight.copy_(table)
    return model, model(ids).logits


def gradients(model: Any, logits: torch.Tensor) -> dict[str, torch.Tensor]:
    """The gradient of one scalar of the logits to every parameter of the model."""
    weights = torch.linspace(-1, 1, logits.numel(), dtype=logits.dtype).view_as(logits)
    model.zero_grad()
    (logits * weights).sum().backward()
    return {
        name: parameter.grad.clone()
        for name, parameter in copy.copy(model).named_parameters()
        if parameter.grad is not None
    }
