"""Tiny models with weights large enough that positions matter, and small helpers around them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertLMHeadModel,
    EncoderDecoderConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
)

import hf_posenc

POSITIVE = (".slopes", ".a", ".p", ".rate", ".length")
"""Parameters of schemes that mean something only above zero, and up to 2."""
VOCABULARY, WIDTH, LAYERS, HEADS, TRAINED_LENGTH, PAD = 61, 32, 3, 4, 48, 0


def config(architecture: str, **changes: Any) -> Any:
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


def composite_config() -> Any:
    """Of an encoder and a decoder. Skips the test where stock transformers cannot build one."""
    decoder = config("bert-decoder", add_cross_attention=True)
    try:
        return EncoderDecoderConfig.from_encoder_decoder_configs(config("bert"), decoder)
    except Exception as error:  # a defect of one old pair of libraries, before hf_posenc comes in; only that is let by
        if "is_encoder_decoder" not in str(error):
            raise
        pytest.skip(f"stock EncoderDecoderConfig cannot be built with these versions of its libraries: {error}")


HEADS_OF = {
    "bert": BertForMaskedLM,
    "bert-decoder": BertLMHeadModel,
    "gpt2": GPT2LMHeadModel,
    "llama": LlamaForCausalLM,
}


@torch.no_grad()
def randomise(model: torch.nn.Module, seed: int = 0) -> torch.nn.Module:
    """Weights far from their initialisation: zero biases and tables would hide mistakes."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in sorted(model.named_parameters()):
        noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        is_norm = "norm" in name.lower() or ".ln_" in name
        values = 1 + 0.1 * noise if is_norm and name.endswith("weight") else 0.15 * noise
        if "position_scheme" in name or name.endswith(("wpe.weight", "position_embeddings.weight")):
            values = 0.6 * noise
        parameter.copy_(values)
    return model


def model(
    architecture: str, scheme: Any = None, dtype: torch.dtype = torch.float64, seed: int = 0, **changes: Any
) -> Any:
    """A tiny language model in eval mode; with no scheme, the stock one with the same weights in common."""
    built = HEADS_OF[architecture](config(architecture, **changes)).to(torch.float64)
    randomise(built, seed)
    if scheme is not None:
        hf_posenc.retrofit(built, scheme)
        generator = torch.Generator().manual_seed(seed + 1)
        with torch.no_grad():
            for name, parameter in built.named_parameters():
                if "position_scheme" in name:
                    noise = 0.6 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                    parameter.copy_((0.2 + noise.abs()).clamp(max=1.9) if name.endswith(POSITIVE) else noise)
    return built.to(dtype).eval()


def tokens(rows: int = 2, length: int = 12, seed: int = 0) -> torch.Tensor:
    return torch.randint(3, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(seed))


def base_of(built: Any) -> Any:
    return built.base_model


def same(architecture: str) -> dict[str, float]:
    """Tolerances between two float64 runs that take their sums in another order.

    LLaMA computes its norms, and its eager softmax, in float32 whatever the model is: there it is float32 rounding.
    """
    return {"rtol": 0, "atol": 3e-6 if architecture == "llama" else 1e-10}


def additive(visible: torch.Tensor, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """A mask to add to the logits: 0 where there is something to see, the lowest number elsewhere."""
    return torch.where(visible, torch.zeros((), dtype=dtype), torch.finfo(dtype).min)
