"""What a scheme must equal: the stock model, given the position signal by code of transformers that is not ours.

A score term goes into the stock model as a 4D attention mask; a rotation through an attention function that calls
LLaMA's or RoFormer's own rotary code; an embedding as the stock table. Everything else is the stock forward.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import importlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.bloom.modeling_bloom import build_alibi_tensor
from transformers.models.distilbert.modeling_distilbert import create_sinusoidal_embeddings
from transformers.models.llama import modeling_llama
from transformers.models.roformer.modeling_roformer import RoFormerSinusoidalPositionalEmbedding
from transformers.models.t5.configuration_t5 import T5Config
from transformers.models.t5.modeling_t5 import T5Attention

from tests.support import tiny_models as tiny

LENGTH = 14


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


def roformer_table(length: int) -> torch.Tensor:
    return RoFormerSinusoidalPositionalEmbedding(length, tiny.WIDTH).create_weight().to(torch.float64)


Turn = Callable[[torch.Tensor], torch.Tensor]


@dataclasses.dataclass
class Layer:
    """What an oracle does in one layer: turn queries and keys, and add a bias to the scores."""

    turn: Turn | None = None
    bias: torch.Tensor | None = None
    turn_keys: Turn | None = None
    """Where keys are turned otherwise than queries."""


@contextlib.contextmanager
def stock_with(architecture: str, layers: list[Layer]) -> Iterator[Any]:
    """The stock model whose registered attention function does to each layer what the oracle says."""
    stock = {"gpt2": "gpt2", "llama": "llama"}.get(architecture, "bert")
    module = importlib.import_module(f"transformers.models.{stock}.modeling_{stock}")

    def attention(attending: Any, query: Any, key: Any, value: Any, mask: Any, **kwargs: Any) -> Any:
        layer = layers[attending.layer_idx]
        if layer.turn is not None:
            query, key = layer.turn(query), (layer.turn_keys or layer.turn)(key)
        if layer.bias is not None:
            mask = (mask + layer.bias).clamp(min=torch.finfo(torch.float64).min)
        return module.eager_attention_forward(attending, query, key, value, mask, **kwargs)

    ALL_ATTENTION_FUNCTIONS.register("oracle", attention)
    model = silent_stock(architecture)
    model.config._attn_implementation = "oracle"
    try:
        yield model
    finally:
        ALL_ATTENTION_FUNCTIONS._global_mapping.pop("oracle")


def llama_turn(length: int) -> Turn:
    """LLaMA's own rotary functions."""
    rotary = modeling_llama.LlamaRotaryEmbedding(tiny.config("llama"))
    cosines, sines = rotary(torch.zeros(1, dtype=torch.float64), torch.arange(length)[None])
    return lambda states: modeling_llama.apply_rotary_pos_emb(states, states, cosines, sines)[0]


def complex_turn(length: int, theta: float, turned: int, interleaved: bool) -> Turn:
    """Rotation as the paper writes it: pairs of features are complex numbers, times e^(i position frequency)."""

    def turn(states: torch.Tensor) -> torch.Tensor:
        result = states.clone()
        for position in range(length):
            for pair in range(turned // 2):
                angle = torch.tensor(position / theta ** (2 * pair / turned), dtype=torch.float64)
                one, two = (2 * pair, 2 * pair + 1) if interleaved else (pair, pair + turned // 2)
                number = torch.complex(states[:, :, position, one], states[:, :, position, two])
                number = number * torch.polar(torch.ones_like(angle), angle)
                result[:, :, position, one], result[:, :, position, two] = number.real, number.imag
        return result

    return turn


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


def compare(architecture: str, model: Any, stock: Any, expected: torch.Tensor, ids: torch.Tensor, atol: float) -> None:
    """Logits, and gradients of all parameters that the two models have in common."""
    logits = model(ids).logits
    torch.testing.assert_close(logits, expected, rtol=0, atol=atol)
    ours, theirs = gradients(model, logits), gradients(stock, expected)
    own_positions = {name for name in theirs if "wpe" in name or "position_embeddings" in name}
    assert theirs.keys() - ours.keys() <= own_positions
    for name in theirs.keys() - own_positions:
        scale = theirs[name].abs().max().clamp(min=1)
        torch.testing.assert_close(
            ours[name] / scale, theirs[name] / scale, rtol=0, atol=atol, msg=lambda t, n=name: f"{n}: {t}"
        )


def tolerance(architecture: str) -> float:
    return tiny.same(architecture)["atol"] * 10  # eager against sdpa, and many layers of gradient


def equals_stock_with(
    architecture: str, scheme: Any, layers: list[Layer], ids: torch.Tensor, atol: float
) -> tuple[Any, torch.Tensor]:
    with stock_with(architecture, layers) as stock:
        mask = causal_mask(architecture, LENGTH).expand(2, -1, -1, -1)
        expected = stock(ids, attention_mask=mask).logits
        model = tiny.model(architecture, scheme)
        compare(architecture, model, stock, expected, ids, atol)
    return model, expected
