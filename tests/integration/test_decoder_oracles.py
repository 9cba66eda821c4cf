"""Models of transformers that equal GPT-2 or LLaMA with a scheme: GPT-NeoX, GPT-J, BLOOM, MPT, Phi-3, GLM, T5."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch
import transformers
from transformers import GPT2Config, GPT2Model, LlamaConfig, LlamaModel
from transformers.models.t5.modeling_t5 import T5Stack
from transformers.models.umt5.modeling_umt5 import UMT5Stack

from tests.support import tiny_models as tiny
from tests.support.model_oracles import (
    EQUAL,
    HEAD_SIZE,
    HEADS,
    LENGTH,
    MLP_SIZES,
    SIZES,
    T5_PERTURBATION,
    T5_SCHEME,
    T5_SIZES,
    WIDTH,
    Weights,
    assert_different,
    assert_equal,
    in_float64,
    randomised_oracle,
    rename_weights,
    run_with_weights,
)


def for_gpt2(oracle: torch.nn.Module, rules: dict[str, str], heads: int = 0) -> Weights:
    """Rename weights, transpose them for GPT-2, and if `heads` is given, ungroup queries, keys and values by head."""
    weights = rename_weights(oracle, rules)
    for name, weight in weights.items():
        if heads and "c_attn" in name:
            weight = weight.unflatten(0, (heads, 3, -1)).transpose(0, 1).flatten(0, 2)
        weights[name] = weight.T if re.search(r"c_\w+\.weight$", name) else weight
    return weights


MEGATRON_TO_GPT2 = {
    r"^embed_in|^word_embeddings\b": "wte",
    r"^layers": "h",
    r"final_layer_norm": "ln_f",
    r"input_layernorm": "ln_1",
    r"post_attention_layernorm": "ln_2",
    r"(self_)?attention\.query_key_value": "attn.c_attn",
    r"(self_)?attention\.dense": "attn.c_proj",
    r"dense_h_to_4h": "c_fc",
    r"dense_4h_to_h": "c_proj",
}
"""For GPT-NeoX and BLOOM, which both descend from Megatron."""


@pytest.mark.parametrize("factor", [1.0, 0.5, 0.25])
def test_gpt_neox_equals_gpt2_with_partial_rope(factor: float) -> None:
    rotation = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": factor}
    config = transformers.GPTNeoXConfig(**SIZES, **MLP_SIZES, rope_parameters=rotation, use_parallel_residual=False)
    config.rope_parameters["partial_rotary_factor"] = factor  # older releases overwrite it with a default
    oracle, ids = randomised_oracle(transformers.GPTNeoXModel(config)), tiny.tokens(2, LENGTH)
    weights, expected = for_gpt2(oracle, MEGATRON_TO_GPT2, HEADS), oracle(ids).last_hidden_state

    def gpt2(**changes: Any) -> torch.Tensor:
        scheme = {"type": "rope", "theta": 10000.0, "partial_rotary_factor": factor, **changes}
        changes = {"n_inner": 40, "activation_function": "gelu", "position_scheme": scheme}
        return run_with_weights(GPT2Model(GPT2Config(**SIZES, **changes)), weights, ids)

    assert_equal(oracle, expected, gpt2())
    assert_different(oracle, expected, gpt2(theta=9000.0))
    assert_different(oracle, expected, gpt2(partial_rotary_factor=0.75))
    assert_different(oracle, expected, gpt2(layout="interleaved"))


@pytest.mark.parametrize("rotary_dim", [HEAD_SIZE, 8, 4])
def test_gptj_equals_gpt2_with_interleaved_rope(rotary_dim: int) -> None:
    """GPT-J's MLP runs in parallel to attention and GPT-2's after it, so the last matrix of both is set to zero."""
    oracle = randomised_oracle(transformers.GPTJModel(transformers.GPTJConfig(**SIZES, rotary_dim=rotary_dim)))
    for layer in oracle.h:
        layer.mlp.requires_grad_(False).fc_out.weight.zero_()
        layer.mlp.fc_out.bias.zero_()
    rules = {r"mlp\.fc_in": "mlp.c_fc", r"mlp\.fc_out": "mlp.c_proj", r"out_proj": "c_proj"}
    weights, ids = for_gpt2(oracle, rules), tiny.tokens(2, LENGTH)
    for layer in range(SIZES["num_hidden_layers"]):
        projections = [weights.pop(f"h.{layer}.attn.{name}_proj.weight").T for name in "qkv"]
        weights[f"h.{layer}.attn.c_attn.weight"] = torch.cat(projections, 1)
        weights |= {f"h.{layer}.ln_2.{name}": torch.ones(WIDTH, dtype=torch.float64) for name in ("weight", "bias")}
    with in_float64("gptj"):
        expected = oracle(ids).last_hidden_state

    def gpt2(**changes: Any) -> torch.Tensor:
        scheme = {"type": "rope", "layout": "interleaved", "partial_rotary_factor": rotary_dim / HEAD_SIZE, **changes}
        return run_with_weights(GPT2Model(GPT2Config(**SIZES, position_scheme=scheme)), weights, ids)

    assert_equal(oracle, expected, gpt2())
    assert_different(oracle, expected, gpt2(theta=9000.0))
    assert_different(oracle, expected, gpt2(partial_rotary_factor=0.75))
    assert_different(oracle, expected, gpt2(layout="halves"))


def gpt2_with_alibi(weights: Weights, heads: int, act: Any, first_slope: float | None = None, **inputs: Any) -> Any:
    """GPT-2 with fixed slopes, or with learned slopes that start the same, the first one multiplied by a factor."""
    scheme = {"type": "alibi", "learned": first_slope is not None}
    model = GPT2Model(GPT2Config(**SIZES | {"num_attention_heads": heads}, position_scheme=scheme))
    for layer in model.h:
        layer.mlp.act = act
    if first_slope is not None:
        slopes = model.position_scheme[0].slopes.detach().double()
        slopes[0] *= first_slope
        weights = weights | {"position_scheme.0.slopes": slopes}
    return run_with_weights(model, weights, **inputs)


@pytest.mark.parametrize("heads", [4, 6, 12])
@pytest.mark.parametrize("padded", [False, True], ids=["unpadded", "left-padded"])
def test_bloom_equals_gpt2_with_alibi(heads: int, padded: bool) -> None:
    """GPT-2 gets BLOOM's normalized word embeddings, and its GELU, which rounds a constant to 8 digits.

    `in_float64` makes BLOOM's slopes as exact as ours.
    """
    oracle = randomised_oracle(
        transformers.BloomModel(transformers.BloomConfig(**SIZES | {"num_attention_heads": heads}))
    )
    ids, mask = tiny.tokens(2, LENGTH), torch.ones(2, LENGTH, dtype=torch.long)
    mask[1, : 5 if padded else 0] = 0
    weights = for_gpt2(oracle, MEGATRON_TO_GPT2, heads)
    weights = {name: weight for name, weight in weights.items() if "word_embeddings_layernorm" not in name}
    words = oracle.word_embeddings_layernorm(oracle.word_embeddings(ids))
    with in_float64("bloom"):
        expected = oracle(ids, attention_mask=mask).last_hidden_state[mask.bool()]

    def gpt2(first_slope: float | None = None) -> torch.Tensor:
        inputs = {"inputs_embeds": words, "attention_mask": mask}
        return gpt2_with_alibi(weights, heads, oracle.h[0].mlp.gelu_impl, first_slope, **inputs)[mask.bool()]

    assert_equal(oracle, expected, gpt2())
    assert_different(oracle, expected, gpt2(first_slope=1.01))


@pytest.mark.parametrize(("heads", "atol"), [(4, EQUAL), (6, EQUAL), (12, 3e-6)])
def test_mpt_equals_gpt2_with_alibi_and_without_biases(heads: int, atol: float) -> None:
    """MPT's slopes are float32: exact for powers of two, else off by 3e-8, which the layers amplify."""
    oracle = randomised_oracle(transformers.MptModel(transformers.MptConfig(**SIZES | {"num_attention_heads": heads})))
    rules = {r"^blocks": "h", r"norm_(\w)\.": r"ln_\1.", r"Wqkv": "c_attn", r"out_proj": "c_proj"}
    rules |= {r"ffn\.up_proj": "mlp.c_fc", r"ffn\.down_proj": "mlp.c_proj"}
    weights, ids = for_gpt2(oracle, rules), tiny.tokens(2, LENGTH)
    with in_float64("mpt"):
        expected = oracle(ids).last_hidden_state

    def gpt2(first_slope: float | None = None) -> torch.Tensor:
        return gpt2_with_alibi(weights, heads, torch.nn.GELU(), first_slope, input_ids=ids)

    assert_equal(oracle, expected, gpt2(), atol)
    assert_different(oracle, expected, gpt2(first_slope=1.01))


def unfuse(weights: Weights, name: str, rows_by_name: dict[str, int]) -> Weights:
    """Split the fused matrices of this name into new ones, by number of rows."""
    split: Weights = {}
    for label, weight in weights.items():
        pieces = weight.split(list(rows_by_name.values())) if name in label else [weight]
        split |= {label.replace(name, new): piece for new, piece in zip(rows_by_name, pieces, strict=False)}
    return split


@pytest.mark.parametrize(("name", "layout"), [("phi3", "halves"), ("glm", "interleaved")])
def test_phi3_and_glm_equal_llama_with_partial_rope(name: str, layout: str) -> None:
    configuration = {"phi3": transformers.Phi3Config, "glm": transformers.GlmConfig}[name]
    kind = {"phi3": transformers.Phi3Model, "glm": transformers.GlmModel}[name]
    sizes = {**SIZES, **MLP_SIZES, "num_key_value_heads": 2, "head_dim": HEAD_SIZE, "rms_norm_eps": 1e-6}
    rotation = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
    oracle, ids = randomised_oracle(kind(configuration(**sizes, rope_parameters=rotation))), tiny.tokens(2, LENGTH)
    weights = unfuse(dict(oracle.named_parameters()), "gate_up_proj", {"gate_proj": 40, "up_proj": 40})
    weights = unfuse(weights, "qkv_proj", {"q_proj": WIDTH, "k_proj": 2 * HEAD_SIZE, "v_proj": 2 * HEAD_SIZE})

    def llama(**changes: Any) -> torch.Tensor:
        scheme = {"type": "rope", "layout": layout, "theta": 10000.0, "partial_rotary_factor": 0.5, **changes}
        return run_with_weights(
            LlamaModel(LlamaConfig(**sizes, attention_bias=name == "glm", position_scheme=scheme)), weights, ids
        )

    with in_float64(name, "llama"):
        expected = oracle(ids).last_hidden_state
        assert_equal(oracle, expected, llama())
        assert_different(oracle, expected, llama(theta=9000.0))
        assert_different(oracle, expected, llama(partial_rotary_factor=0.75))


@pytest.mark.parametrize("causal", [True, False], ids=["decoder", "encoder"])
@pytest.mark.parametrize("name", ["t5", "umt5"])
def test_t5_stacks_equal_llama_with_t5(name: str, causal: bool) -> None:
    """A gated T5 has the same parts as LLaMA. It does not scale its scores, so our queries are scaled up instead.

    A decoder without encoder states skips cross-attention. UMT5 has a table per layer.
    """
    configuration = {"t5": transformers.T5Config, "umt5": transformers.UMT5Config}[name]
    settings = {"d_ff": 40, "feed_forward_proj": "gated-silu", "is_decoder": causal, "is_encoder_decoder": False}
    oracle = randomised_oracle(
        {"t5": T5Stack, "umt5": UMT5Stack}[name](configuration(**SIZES, **T5_SIZES, **settings, use_cache=False))
    )
    ids = tiny.tokens(2, LENGTH)
    table = {"t5": "position_scheme.0.table", "umt5": r"\1.self_attn.position_scheme.0"}[name]
    rules = {
        r"^block": "layers",
        r"(layers\.\d+)\.layer\.0\.SelfAttention\.relative_attention_bias": table,
        r"layer\.0\.SelfAttention\.(\w)": r"self_attn.\1_proj",
        r"layer\.0\.layer_norm": "input_layernorm",
        r"layer\.\d\.DenseReluDense\.": "mlp.",
        r"wi_0": "gate_proj",
        r"wi_1": "up_proj",
        r"wo\b": "down_proj",
        rf"layer\.{2 if causal else 1}\.layer_norm": "post_attention_layernorm",
        r"final_layer_norm": "norm",
    }
    weights = {label: weight for label, weight in rename_weights(oracle, rules).items() if ".layer.1." not in label}
    weights |= {label: weight * math.sqrt(HEAD_SIZE) for label, weight in weights.items() if "q_proj" in label}
    perturbed = {label: weight + T5_PERTURBATION for label, weight in weights.items() if "position_scheme" in label}

    def llama(weights: Weights) -> torch.Tensor:
        scheme = {**T5_SCHEME, "shared": name == "t5"}
        changes = {"rms_norm_eps": 1e-6, "is_causal": causal, "position_scheme": scheme}
        return run_with_weights(LlamaModel(LlamaConfig(**SIZES, **MLP_SIZES, **changes)), weights, ids)

    with in_float64(name, "llama"):
        expected = oracle(ids).last_hidden_state
        assert_equal(oracle, expected, llama(weights))
        assert_different(oracle, expected, llama(weights | perturbed))
