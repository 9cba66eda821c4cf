"""Tiny models whose weights are large enough for positions to matter, and small helpers for them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertLMHeadModel,
    EncoderDecoderConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
)

import hf_posenc

VOCABULARY, WIDTH, LAYERS, HEADS, TRAINED_LENGTH, PAD = 61, 32, 3, 4, 48, 0
MODEL_CLASSES = {
    "bert": BertForMaskedLM,
    "bert-decoder": BertLMHeadModel,
    "gpt2": GPT2LMHeadModel,
    "llama": LlamaForCausalLM,
}
POSITIVE_PARAMETERS = (".slopes", ".a", ".p", ".rate", ".length")
"""Scheme parameters that must be positive; some also need to stay below 2."""


def config(architecture: str, **changes: Any) -> PreTrainedConfig:
    """The config of a tiny model, without dropout."""
    common = {"vocab_size": VOCABULARY, "pad_token_id": PAD, "bos_token_id": 1, "eos_token_id": 2}
    if architecture == "gpt2":
        sizes = {"n_embd": WIDTH, "n_layer": LAYERS, "n_head": HEADS, "n_positions": TRAINED_LENGTH}
        dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        return GPT2Config(**{**common, **sizes, **dropout, **changes})
    sizes = {
        "hidden_size": WIDTH,
        "intermediate_size": 40,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "max_position_embeddings": TRAINED_LENGTH,
    }
    if architecture == "llama":
        return LlamaConfig(**{**common, **sizes, "num_key_value_heads": 2, **changes})
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    decoder = {"is_decoder": True} if architecture == "bert-decoder" else {}
    return BertConfig(**{**common, **sizes, **dropout, **decoder, **changes})


def composite_config() -> EncoderDecoderConfig:
    """An encoder-decoder config; skips the test where stock transformers cannot build one."""
    decoder = config("bert-decoder", add_cross_attention=True)
    try:
        return EncoderDecoderConfig.from_encoder_decoder_configs(config("bert"), decoder)
    except Exception as error:  # one old pair of library versions fails here, before hf_posenc is involved
        if "is_encoder_decoder" not in str(error):
            raise
        pytest.skip(f"stock EncoderDecoderConfig cannot be built with these library versions: {error}")


@torch.no_grad()
def randomise(model: nn.Module, seed: int = 0) -> nn.Module:
    """Move all weights far from their initialization: zero biases and tables would hide mistakes."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in sorted(model.named_parameters()):
        noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        is_norm = "norm" in name.lower() or ".ln_" in name
        values = 1 + 0.1 * noise if is_norm and name.endswith("weight") else 0.15 * noise
        if "position_scheme" in name or name.endswith(("wpe.weight", "position_embeddings.weight")):
            values = 0.6 * noise
        parameter.copy_(values)
    return model


@torch.no_grad()
def randomise_scheme(model: nn.Module, seed: int = 1) -> nn.Module:
    """Move the parameters of the schemes far from neutral."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if "position_scheme" in name:
            noise = 0.6 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            positive = name.endswith(POSITIVE_PARAMETERS)
            parameter.copy_((0.2 + noise.abs()).clamp(max=1.9) if positive else noise)
    return model


def model(
    architecture: str,
    scheme: Any = None,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
    **changes: Any,
) -> PreTrainedModel:
    """A tiny language model in eval mode. Without a scheme it is the stock model with the same shared weights."""
    built = _stock_model(architecture, seed, **changes)
    if scheme is not None:
        hf_posenc.retrofit(built, scheme)
        randomise_scheme(built, seed + 1)
    return _cast(built, dtype).eval()


_stock_models: dict[tuple[object, ...], PreTrainedModel] = {}


def _stock_model(architecture: str, seed: int, **changes: Any) -> PreTrainedModel:
    """A copy of a model that was built once: thousands of tests ask for the same ones. Leaves random states alone."""
    key = (architecture, seed, repr(sorted(changes.items())), torch.get_default_device(), torch.get_default_dtype())
    if key not in _stock_models:
        with torch.random.fork_rng(devices=[]):
            built = MODEL_CLASSES[architecture](config(architecture, **changes)).to(torch.float64)
        _stock_models[key] = randomise(built, seed)
    return copy.deepcopy(_stock_models[key])


def _cast(built: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """Cast as `from_pretrained(dtype=...)` does: `Module.to` would also round LLaMA's rotary frequencies."""
    frequencies = {name: buffer for name, buffer in built.named_buffers() if name.endswith("inv_freq")}
    built.to(dtype)
    for name, buffer in frequencies.items():
        path, _, attribute = name.rpartition(".")
        setattr(built.get_submodule(path), attribute, buffer)
    return built


def tokens(rows: int = 2, length: int = 12, seed: int = 0) -> torch.Tensor:
    """Random token ids without special tokens."""
    return torch.randint(3, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(seed))


def tolerances(architecture: str) -> dict[str, float]:
    """Tolerances between two float64 runs that sum in a different order.

    LLaMA computes its norms, and its eager softmax, in float32 whatever the dtype of the model.
    """
    return {"rtol": 0, "atol": 3e-6 if architecture == "llama" else 1e-10}


def additive_mask(visible: torch.Tensor, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """A mask to add to the attention scores: 0 where visible, the lowest finite number elsewhere."""
    return torch.where(visible, torch.zeros((), dtype=dtype), torch.finfo(dtype).min)


def padding_mask(ids: torch.Tensor, counts: list[int]) -> torch.Tensor:
    """A mask that hides as many slots of each row: the first ones, or the last ones if the count is negative."""
    mask = torch.ones_like(ids)
    for row, count in zip(mask, counts, strict=True):
        row[slice(count, None) if count < 0 else slice(count)] = 0
    return mask


def generate_logits(model: Any, ids: torch.Tensor, mask: torch.Tensor, **options: Any) -> torch.Tensor:
    """The logits of four new tokens by greedy search."""
    output = model.generate(
        ids,
        attention_mask=mask,
        max_new_tokens=4,
        min_new_tokens=4,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
        **options,
    )
    return torch.stack(output.logits, dim=1)
