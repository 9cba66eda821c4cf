"""More whole models, compared as in test_whole_models.py: those that are GPT-2 or LLaMA with a scheme."""

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

from tests.integration.test_encoder_oracles import (
    HEAD_SIZE,
    HEADS,
    INNER,
    LENGTH,
    NUDGE,
    SAME,
    SIZES,
    T5_SCHEME,
    T5_SIZES,
    WIDTH,
    Weights,
    assert_other,
    assert_same,
    filled,
    renamed,
    run,
    widened,
)
from tests.support import tiny_models as tiny


def for_gpt2(oracle: torch.nn.Module, rules: dict[str, str], heads: int = 0) -> Weights:
    """GPT-2 keeps its matrices transposed, and queries, keys and values one after the other, not `heads` by head."""
    weights = renamed(oracle, rules)
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
"""GPT-NeoX and BLOOM, which descend from one code base."""


@pytest.mark.parametrize("share", [1.0, 0.5, 0.25])
def test_gpt_neox_is_gpt2_with_partial_rope(share: float) -> None:
    rotation = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": share}
    config = transformers.GPTNeoXConfig(**SIZES, **INNER, rope_parameters=rotation, use_parallel_residual=False)
    config.rope_parameters["partial_rotary_factor"] = share  # older releases overwrite it with a default
    oracle, ids = filled(transformers.GPTNeoXModel(config)), tiny.tokens(2, LENGTH)
    weights, expected = for_gpt2(oracle, MEGATRON_TO_GPT2, HEADS), oracle(ids).last_hidden_state

    def gpt2(**changes: Any) -> torch.Tensor:
        scheme = {"type": "rope", "theta": 10000.0, "partial_rotary_factor": share, **changes}
        changes = {"n_inner": 40, "activation_function": "gelu", "position_scheme": scheme}
        return run(GPT2Model(GPT2Config(**SIZES, **changes)), weights, ids)

    assert_same(oracle, expected, gpt2())
    assert_other(oracle, expected, gpt2(theta=9000.0))
    assert_other(oracle, expected, gpt2(partial_rotary_factor=0.75))
    assert_other(oracle, expected, gpt2(layout="interleaved"))


@pytest.mark.parametrize("turned", [HEAD_SIZE, 8, 4])
def test_gptj_is_gpt2_with_interleaved_rope(turned: int) -> None:
    """GPT-J's feed-forward runs beside its attention, GPT-2's after it: both are silenced by their last matrix."""
    oracle = filled(transformers.GPTJModel(transformers.GPTJConfig(**SIZES, rotary_dim=turned)))
    for layer in oracle.h:
        layer.mlp.requires_grad_(False).fc_out.weight.zero_()
        layer.mlp.fc_out.bias.zero_()
    rules = {r"mlp\.fc_in": "mlp.c_fc", r"mlp\.fc_out": "mlp.c_proj", r"out_proj": "c_proj"}
    weights, ids = for_gpt2(oracle, rules), tiny.tokens(2, LENGTH)
    for layer in range(SIZES["num_hidden_layers"]):
        parts = [weights.pop(f"h.{layer}.attn.{part}_proj.weight").T for part in "qkv"]
        weights[f"h.{layer}.attn.c_attn.weight"] = torch.cat(parts, 1)
        weights |= {f"h.{layer}.ln_2.{part}": torch.ones(WIDTH, dtype=torch.float64) for part in ("weight", "bias")}
    with widened("gptj"):
        expected = oracle(ids).last_hidden_state

    def gpt2(**changes: Any) -> torch.Tensor:
        scheme = {"type": "rope", "layout": "interleaved", "partial_rotary_factor": turned / HEAD_SIZE, **changes}
        return run(GPT2Model(GPT2Config(**SIZES, position_scheme=scheme)), weights, ids)

    assert_same(oracle, expected, gpt2())
    assert_other(oracle, expected, gpt2(theta=9000.0))
    assert_other(oracle, expected, gpt2(partial_rotary_factor=0.75))
    assert_other(oracle, expected, gpt2(layout="halves"))


def gpt2_with_alibi(weights: Weights, heads: int, act: Any, first_slope: float | None = None, **inputs: Any) -> Any:
    """The fixed slopes; or learned ones, which start as these, the first of them times a factor."""
    scheme = {"type": "alibi", "learned": first_slope is not None}
    model = GPT2Model(GPT2Config(**SIZES | {"num_attention_heads": heads}, position_scheme=scheme))
    for layer in model.h:
        layer.mlp.act = act
    if first_slope is not None:
        slopes = model.position_scheme[0].slopes.detach().double()
        slopes[0] *= first_slope
        weights = weights | {"position_scheme.0.slopes": slopes}
    return run(model, weights, **inputs)


@pytest.mark.parametrize("heads", [4, 6, 12])
@pytest.mark.parametrize("padded", [False, True], ids=["unpadded", "left-padded"])
def test_bloom_is_gpt2_with_alibi(heads: int, padded: bool) -> None:
    """GPT-2 starts from BLOOM's normalised word embeddings, and has its gelu: BLOOM rounds a constant to 8 digits.

    BLOOM's slopes would be float32; widened, they are as exact as ours.
    """
    oracle = filled(transformers.BloomModel(transformers.BloomConfig(**SIZES | {"num_attention_heads": heads})))
    ids, mask = tiny.tokens(2, LENGTH), torch.ones(2, LENGTH, dtype=torch.long)
    mask[1, : 5 if padded else 0] = 0
    weights = for_gpt2(oracle, MEGATRON_TO_GPT2, heads)
    weights = {name: weight for name, weight in weights.items() if "word_embeddings_layernorm" not in name}
    words = oracle.word_embeddings_layernorm(oracle.word_embeddings(ids))
    with widened("bloom"):
        expected = oracle(ids, attention_mask=mask).last_hidden_state[mask.bool()]

    def gpt2(first_slope: float | None = None) -> torch.Tensor:
        inputs = {"inputs_embeds": words, "attention_mask": mask}
        return gpt2_with_alibi(weights, heads, oracle.h[0].mlp.gelu_impl, first_slope, **inputs)[mask.bool()]

    assert_same(oracle, expected, gpt2())
    assert_other(oracle, expected, gpt2(first_slope=1.01))


@pytest.mark.parametrize(("heads", "within"), [(4, SAME), (6, SAME), (12, 3e-6)])
def test_mpt_is_gpt2_with_alibi_and_without_biases(heads: int, within: float) -> None:
    """MPT's slopes are float32: exact where they are powers of two, else 3e-8 off, which the layers enlarge."""
    oracle = filled(transformers.MptModel(transformers.MptConfig(**SIZES | {"num_attention_heads": heads})))
    rules = {r"^blocks": "h", r"norm_(\w)\.": r"ln_\1.", r"Wqkv": "c_attn", r"out_proj": "c_proj"}
    rules |= {r"ffn\.up_proj": "mlp.c_fc", r"ffn\.down_proj": "mlp.c_proj"}
    weights, ids = for_gpt2(oracle, rules), tiny.tokens(2, LENGTH)
    with widened("mpt"):
        expected = oracle(ids).last_hidden_state

    def gpt2(first_slope: float | None = None) -> torch.Tensor:
        return gpt2_with_alibi(weights, heads, torch.nn.GELU(), first_slope, input_ids=ids)

    assert_same(oracle, expected, gpt2(), within)
    assert_other(oracle, expected, gpt2(first_slope=1.01))


def unfused(weights: Weights, name: str, parts: dict[str, int]) -> Weights:
    """Matrices of this name, cut into parts of so many rows each."""
    cut: Weights = {}
    for label, weight in weights.items():
        rows = weight.split(list(parts.values())) if name in label else [weight]
        cut |= {label.replace(name, part): piece for part, piece in zip(parts, rows, strict=False)}
    return cut


@pytest.mark.parametrize(("name", "layout"), [("phi3", "halves"), ("glm", "interleaved")])
def test_phi3_and_glm_are_llama_with_partial_rope(name: str, layout: str) -> None:
    configuration = {"phi3": transformers.Phi3Config, "glm": transformers.GlmConfig}[name]
    kind = {"phi3": transformers.Phi3Model, "glm": transformers.GlmModel}[name]
    sizes = {**SIZES, **INNER, "num_key_value_heads": 2, "head_dim": HEAD_SIZE, "rms_norm_eps": 1e-6}
    rotation = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
    oracle, ids = filled(kind(configuration(**sizes, rope_parameters=rotation))), tiny.tokens(2, LENGTH)
    weights = unfused(dict(oracle.named_parameters()), "gate_up_proj", {"gate_proj": 40, "up_proj": 40})
    weights = unfused(weights, "qkv_proj", {"q_proj": WIDTH, "k_proj": 2 * HEAD_SIZE, "v_proj": 2 * HEAD_SIZE})

    def llama(**changes: Any) -> torch.Tensor:
        scheme = {"type": "rope", "layout": layout, "theta": 10000.0, "partial_rotary_factor": 0.5, **changes}
        return run(LlamaModel(LlamaConfig(**sizes, attention_bias=name == "glm", position_scheme=scheme)), weights, ids)

    with widened(name, "llama"):
        expected = oracle(ids).last_hidden_state
        assert_same(oracle, expected, llama())
        assert_other(oracle, expected, llama(theta=9000.0))
        assert_other(oracle, expected, llama(partial_rotary_factor=0.75))


@pytest.mark.parametrize("causal", [True, False], ids=["decoder", "encoder"])
@pytest.mark.parametrize("name", ["t5", "umt5"])
def test_t5_stacks_are_llama_with_t5(name: str, causal: bool) -> None:
    """T5's gated kind has LLaMA's parts; it does not scale its scores, so our queries are larger by as much.

    A decoder that is given no encoder's states skips its cross-attention. UMT5 has a table in every layer.
    """
    configuration = {"t5": transformers.T5Config, "umt5": transformers.UMT5Config}[name]
    settings = {"d_ff": 40, "feed_forward_proj": "gated-silu", "is_decoder": causal, "is_encoder_decoder": False}
    oracle = filled(
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
    weights = {label: weight for label, weight in renamed(oracle, rules).items() if ".layer.1." not in label}
    weights |= {label: weight * math.sqrt(HEAD_SIZE) for label, weight in weights.items() if "q_proj" in label}
    nudged = {label: weight + NUDGE for label, weight in weights.items() if "position_scheme" in label}

    def llama(weights: Weights) -> torch.Tensor:
        scheme = {**T5_SCHEME, "shared": name == "t5"}
        changes = {"rms_norm_eps": 1e-6, "is_causal": causal, "position_scheme": scheme}
        return run(LlamaModel(LlamaConfig(**SIZES, **INNER, **changes)), weights, ids)

    with widened(name, "llama"):
        expected = oracle(ids).last_hidden_state
        assert_same(oracle, expected, llama(weights))
        assert_other(oracle, expected, llama(weights | nudged))
