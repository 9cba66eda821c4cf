"""Independent implementations of schemes: the stock model, with positions added by other code of transformers.

A score term enters the stock model as a 4D attention mask, a rotation through an attention function that calls LLaMA's
rotary code, and an embedding through the stock position table. Everything else is the stock forward.
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


def stock_without_positions(architecture: str) -> Any:
    """The stock model with a position table of zeros, or with rotary angles of zero."""
    model = tiny.model(architecture)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("wpe.weight", "position_embeddings.weight")):
                parameter.zero_()
    if architecture == "llama":
        model.model.rotary_emb.inv_freq.zero_()
    model.set_attn_implementation("eager")
    return model


@contextlib.contextmanager
def attention_function(model: Any, attention: Callable[..., Any]) -> Iterator[None]:
    """Replace the attention function of a stock model, for which transformers then prepares no mask."""
    ALL_ATTENTION_FUNCTIONS.register("reference", attention)
    model.config._attn_implementation = "reference"
    try:
        yield
    finally:
        ALL_ATTENTION_FUNCTIONS._global_mapping.pop("reference")


@contextlib.contextmanager
def stock_with_attention(architecture: str, attention: Callable[..., Any]) -> Iterator[Any]:
    """The stock model without positions and with another attention function."""
    model = stock_without_positions(architecture)
    with attention_function(model, attention):
        yield model


def causal_mask(architecture: str, length: int) -> torch.Tensor:
    visible = torch.ones(1, 1, length, length, dtype=torch.bool)
    return tiny.additive_mask(visible if architecture == "bert" else visible.tril())


def stock_with_bias(architecture: str, ids: torch.Tensor, bias: torch.Tensor) -> Any:
    """The stock model and its logits with a bias (1, H, n, n) on its attention scores."""
    model = stock_without_positions(architecture)
    mask = (causal_mask(architecture, ids.shape[1]) + bias).clamp(min=torch.finfo(torch.float64).min)
    return model, model(ids, attention_mask=mask.expand(ids.shape[0], -1, -1, -1)).logits


def bloom_alibi(heads: int, length: int) -> torch.Tensor:
    """BLOOM's slopes times the distances. BLOOM's own bias is the slope times the position of the key."""
    by_key = build_alibi_tensor(torch.ones(1, 2), heads, torch.float64)
    slopes = by_key.view(heads, 2)[:, 1]
    positions = torch.arange(length, dtype=torch.float64)
    return -slopes.view(1, -1, 1, 1) * (positions[None, :] - positions[:, None]).abs()


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


Rotation = Callable[[torch.Tensor], torch.Tensor]


@dataclasses.dataclass
class LayerOracle:
    """What an oracle does in one layer: rotate queries and keys, and add a bias to the scores."""

    rotation: Rotation | None = None
    bias: torch.Tensor | None = None
    key_rotation: Rotation | None = None
    """If keys are rotated differently from queries."""


@contextlib.contextmanager
def stock_with_layers(architecture: str, layers: list[LayerOracle]) -> Iterator[Any]:
    """The stock model with an attention function that applies the oracle of each layer."""
    model_type = {"gpt2": "gpt2", "llama": "llama"}.get(architecture, "bert")
    modeling = importlib.import_module(f"transformers.models.{model_type}.modeling_{model_type}")

    def attention(module: Any, query: Any, key: Any, value: Any, mask: Any, **kwargs: Any) -> Any:
        layer = layers[module.layer_idx]
        if layer.rotation is not None:
            query, key = layer.rotation(query), (layer.key_rotation or layer.rotation)(key)
        if layer.bias is not None:
            mask = (mask + layer.bias).clamp(min=torch.finfo(torch.float64).min)
        return modeling.eager_attention_forward(module, query, key, value, mask, **kwargs)

    with stock_with_attention(architecture, attention) as model:
        yield model


def llama_rotation(length: int) -> Rotation:
    """LLaMA's own rotary functions."""
    rotary = modeling_llama.LlamaRotaryEmbedding(tiny.config("llama"))
    cosines, sines = rotary(torch.zeros(1, dtype=torch.float64), torch.arange(length)[None])
    return lambda states: modeling_llama.apply_rotary_pos_emb(states, states, cosines, sines)[0]


def complex_rotation(length: int, theta: float, rotary_dim: int, interleaved: bool) -> Rotation:
    """RoPE as in its paper: pairs of features are complex numbers, multiplied by e^(i position frequency)."""

    def rotate(states: torch.Tensor) -> torch.Tensor:
        result = states.clone()
        for position in range(length):
            for pair in range(rotary_dim // 2):
                angle = torch.tensor(position / theta ** (2 * pair / rotary_dim), dtype=torch.float64)
                real, imaginary = (2 * pair, 2 * pair + 1) if interleaved else (pair, pair + rotary_dim // 2)
                number = torch.complex(states[:, :, position, real], states[:, :, position, imaginary])
                number = number * torch.polar(torch.ones_like(angle), angle)
                result[:, :, position, real], result[:, :, position, imaginary] = number.real, number.imag
        return result

    return rotate


def stock_with_embeddings(architecture: str, ids: torch.Tensor, table: torch.Tensor) -> Any:
    """The stock model and its logits, with a table of position vectors added to its word embeddings."""
    model = stock_without_positions(architecture)
    if architecture == "llama":
        inputs_embeds = model.get_input_embeddings()(ids)
        return model, model(inputs_embeds=inputs_embeds + table[: ids.shape[1]]).logits
    stock_table = model.transformer.wpe if architecture == "gpt2" else model.bert.embeddings.position_embeddings
    with torch.no_grad():
        stock_table.weight.copy_(table)
    return model, model(ids).logits


def gradients(model: Any, logits: torch.Tensor) -> dict[str, torch.Tensor]:
    """The gradient of a weighted sum of the logits, by name of the parameter."""
    weights = torch.linspace(-1, 1, logits.numel(), dtype=logits.dtype).view_as(logits)
    model.zero_grad()
    (logits * weights).sum().backward()
    return {
        name: parameter.grad.clone()
        for name, parameter in copy.copy(model).named_parameters()
        if parameter.grad is not None
    }


def assert_equal_models(model: Any, stock: Any, expected: torch.Tensor, ids: torch.Tensor, atol: float) -> None:
    """Compare logits, and the gradients of all parameters that both models have."""
    logits = model(ids).logits
    torch.testing.assert_close(logits, expected, rtol=0, atol=atol)
    ours, theirs = gradients(model, logits), gradients(stock, expected)
    stock_tables = {name for name in theirs if "wpe" in name or "position_embeddings" in name}
    assert theirs.keys() - ours.keys() <= stock_tables
    for name in theirs.keys() - stock_tables:
        scale = theirs[name].abs().max().clamp(min=1)
        torch.testing.assert_close(
            ours[name] / scale, theirs[name] / scale, rtol=0, atol=atol, msg=lambda text, name=name: f"{name}: {text}"
        )


def tolerance(architecture: str) -> float:
    """Eager compared with SDPA, through several layers of gradients."""
    return tiny.tolerances(architecture)["atol"] * 10


def assert_equals_stock_with_layers(
    architecture: str, scheme: Any, layers: list[LayerOracle], ids: torch.Tensor, atol: float
) -> torch.Tensor:
    """Compare a variant with the stock model under an oracle per layer; return the logits of the latter."""
    with stock_with_layers(architecture, layers) as stock:
        mask = causal_mask(architecture, LENGTH).expand(2, -1, -1, -1)
        expected = stock(ids, attention_mask=mask).logits
        assert_equal_models(tiny.model(architecture, scheme), stock, expected, ids, atol)
    return expected
