"""Schemes equal independent implementations, logits and gradients, in float64. Every check has a control."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

import hf_posenc
from hf_posenc.errors import PosEncError
from tests.support import oracles
from tests.support import tiny_models as tiny
from tests.support.cases import ARCHITECTURES
from tests.support.oracles import LENGTH, assert_equal_models, assert_equals_stock_with_layers, tolerance

by_architecture = pytest.mark.parametrize("architecture", ARCHITECTURES)


@by_architecture
def test_alibi_equals_stock_with_bloom_slopes(architecture: str) -> None:
    ids = tiny.tokens(2, LENGTH)
    bias = oracles.bloom_alibi(4, LENGTH)
    stock, expected = oracles.stock_with_bias(architecture, ids, bias)
    # BLOOM computes its slopes in float32 and ours are exact: 6e-8 apart, which the layers amplify.
    assert_equal_models(tiny.model(architecture, "alibi"), stock, expected, ids, max(tolerance(architecture), 2e-6))
    _, perturbed = oracles.stock_with_bias(architecture, ids, bias * 1.01)
    assert (perturbed - expected).abs().max() > 1e-4


@pytest.mark.parametrize("heads", [1, 2, 4, 6, 12, 20, 32])
def test_alibi_slopes_equal_bloom_slopes_for_any_number_of_heads(heads: int) -> None:
    from hf_posenc.schemes.distance_functions import alibi_slopes

    theirs = -oracles.bloom_alibi(heads, 2)[0, :, 0, 1]
    torch.testing.assert_close(torch.tensor(alibi_slopes(heads), dtype=torch.float64), theirs, rtol=0, atol=6e-8)


@by_architecture
@pytest.mark.parametrize("shared", [True, False], ids=["shared", "per-layer"])
def test_t5_equals_stock_with_the_bias_of_t5(architecture: str, shared: bool) -> None:
    ids, buckets, max_distance = tiny.tokens(2, LENGTH), 8, 10
    scheme = {"type": "t5", "num_buckets": buckets, "max_distance": max_distance, "shared": shared}
    model = tiny.model(architecture, scheme)
    oracle = oracles.t5_attention(4, buckets, max_distance, bidirectional=architecture == "bert")
    schemes = [module for name, module in model.named_modules() if "position_scheme" in name]
    tables = [module for module in schemes if hasattr(module, "weight")]
    assert len(tables) == (1 if shared else tiny.LAYERS)
    with torch.no_grad():
        for table in tables:
            table.weight.copy_(tables[0].weight)
        oracle.relative_attention_bias.weight.copy_(tables[0].weight)
    stock, expected = oracles.stock_with_bias(architecture, ids, oracle.compute_bias(LENGTH, LENGTH))
    assert_equal_models(model, stock, expected, ids, tolerance(architecture))

    theirs = oracle.relative_attention_bias.weight.grad
    ours = sum(table.weight.grad for table in tables)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=tolerance(architecture) * theirs.abs().max().item())
    assert theirs.abs().max() > 1e-2
    with torch.no_grad():
        oracle.relative_attention_bias.weight[1] += 0.05
    _, perturbed = oracles.stock_with_bias(architecture, ids, oracle.compute_bias(LENGTH, LENGTH))
    assert (perturbed - expected).abs().max() > 1e-4


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize(("buckets", "max_distance"), [(32, 128), (64, 300), (7, 9), (4, 3)])
def test_t5_buckets_equal_those_of_t5_at_every_distance(bidirectional: bool, buckets: int, max_distance: int) -> None:
    from hf_posenc.schemes.t5 import distance_buckets

    oracle = oracles.t5_attention(4, buckets, max_distance, bidirectional)
    distances = torch.arange(-3000, 3001)
    theirs = oracle._relative_position_bucket(distances, bidirectional, buckets, max_distance)
    assert torch.equal(distance_buckets(distances, buckets, max_distance, bidirectional), theirs)


@by_architecture
@pytest.mark.parametrize("layout", ["interleaved", "halves"])
def test_sinusoidal_equals_stock_with_the_table_of_distilbert_or_roformer(architecture: str, layout: str) -> None:
    make_table = oracles.distilbert_table if layout == "interleaved" else oracles.roformer_table
    ids, table = tiny.tokens(2, LENGTH), make_table(tiny.TRAINED_LENGTH)
    stock, expected = oracles.stock_with_embeddings(architecture, ids, table)
    # Both round their table to float32; in a float64 model, ours is float64.
    model = tiny.model(architecture, {"type": "sinusoidal", "layout": layout})
    assert_equal_models(model, stock, expected, ids, max(tolerance(architecture), 2e-6))
    _, perturbed = oracles.stock_with_embeddings(architecture, ids, table * 1.01)
    assert (perturbed - expected).abs().max() > 1e-4


@by_architecture
def test_rope_equals_stock_with_the_rotation_of_llama(architecture: str) -> None:
    ids, layers = tiny.tokens(2, LENGTH), [oracles.LayerOracle(rotation=oracles.llama_rotation(LENGTH))] * tiny.LAYERS
    expected = assert_equals_stock_with_layers(architecture, "rope", layers, ids, tolerance(architecture))
    other = tiny.model(architecture, {"type": "rope", "theta": 9900.0})(ids).logits
    assert (other - expected).abs().max() > 1e-5


@pytest.mark.parametrize("fraction", [0.25, 0.5, 0.8])
def test_rope_without_the_lowest_frequencies_equals_a_stock_llama_without_them(fraction: float) -> None:
    """p-RoPE. Of four frequencies, the highest are kept: one, two or three."""
    ids, stock = tiny.tokens(2, LENGTH), tiny.model("llama")
    kept = {0.25: 1, 0.5: 2, 0.8: 3}[fraction]
    stock.model.rotary_emb.inv_freq[kept:] = 0.0
    model = tiny.model("llama", {"type": "rope", "frequency_fraction": fraction})
    assert_equal_models(model, stock, stock(ids).logits, ids, tolerance("llama"))
    other = tiny.model("llama", {"type": "rope", "partial_rotary_factor": kept / 4})(ids).logits
    assert (other - stock(ids).logits).abs().max() > 1e-4  # features that are not rotated, but other frequencies
    if "proportional" in ROPE_INIT_FUNCTIONS:  # what newer releases of transformers call it
        scaling = {"rope_type": "proportional"}
        same = {"type": "rope", "partial_rotary_factor": kept / 4, "scaling": scaling}
        torch.testing.assert_close(tiny.model("llama", same)(ids).logits, model(ids).logits, rtol=0, atol=1e-12)


def test_a_fraction_must_keep_a_frequency() -> None:
    with pytest.raises(PosEncError, match="keeps none of the 4 frequencies"):
        tiny.model("llama", {"type": "rope", "frequency_fraction": 0.2})


@by_architecture
def test_schemes_act_only_in_their_layers(architecture: str) -> None:
    """A rotation in layers 0 and 2 and a bias in layer 1; in another order, the logits differ."""
    ids = tiny.tokens(2, LENGTH)
    rotated, biased = (
        oracles.LayerOracle(oracles.llama_rotation(LENGTH)),
        oracles.LayerOracle(bias=oracles.bloom_alibi(4, LENGTH)),
    )
    scheme = [{"type": "rope", "layers": "0::2"}, {"type": "alibi", "layers": [1]}]
    atol = max(tolerance(architecture), 2e-6)
    expected = assert_equals_stock_with_layers(architecture, scheme, [rotated, biased, rotated], ids, atol)
    shifted = [{"type": "rope", "layers": [0, 1]}, {"type": "alibi", "layers": [2]}]
    assert (tiny.model(architecture, shifted)(ids).logits - expected).abs().max() > 1e-3


@by_architecture
def test_rotation_and_bias_together(architecture: str) -> None:
    ids = tiny.tokens(2, LENGTH)
    both = oracles.LayerOracle(oracles.llama_rotation(LENGTH), oracles.bloom_alibi(4, LENGTH))
    atol = max(tolerance(architecture), 2e-6)
    expected = assert_equals_stock_with_layers(architecture, ["rope", "alibi"], [both] * tiny.LAYERS, ids, atol)
    assert (tiny.model(architecture, "rope")(ids).logits - expected).abs().max() > 1e-3
    assert (tiny.model(architecture, "alibi")(ids).logits - expected).abs().max() > 1e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(
    "rope_parameters",
    [
        {"rope_type": "default", "rope_theta": 500000.0},
        {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0},
        {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 12},
        {
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 24,
        },
        {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0},
        {
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "factor": 2.0,
            "short_factor": [1.0, 1.1, 1.2, 1.3],
            "long_factor": [1.5, 2.0, 2.5, 3.0],
            "original_max_position_embeddings": 24,
        },
    ],
    ids=lambda parameters: parameters["rope_type"],
)
@pytest.mark.parametrize("length", [20, 60])
def test_rope_on_llama_is_bit_identical_to_stock(rope_parameters: Any, dtype: torch.dtype, length: int) -> None:
    stock = tiny.model("llama", dtype=dtype, rope_parameters=dict(rope_parameters))
    stock.model.rotary_emb = LlamaRotaryEmbedding(
        stock.config
    )  # as loaded from disk: .to(dtype) rounded its frequencies
    ids = tiny.tokens(2, length)
    with torch.no_grad():
        expected = stock(ids, use_cache=False).logits
        assert torch.equal(hf_posenc.retrofit(stock, "rope")(ids, use_cache=False).logits, expected)
        hf_posenc.restore(stock)
        other = hf_posenc.retrofit(stock, {"type": "rope", "theta": 3000.0})(ids, use_cache=False).logits
    assert not torch.equal(other, expected)


@pytest.mark.parametrize("architecture", ["gpt2", "bert", "bert-decoder"])
@pytest.mark.parametrize("backend", ["sdpa", "eager"])
def test_learned_on_a_model_with_a_table_is_bit_identical_to_stock(architecture: str, backend: str) -> None:
    stock, ids = tiny.model(architecture, dtype=torch.float32), tiny.tokens(2, LENGTH)
    stock.set_attn_implementation(backend)
    mask = torch.ones_like(ids)
    mask[1, -4:] = 0
    with torch.no_grad():
        expected = [stock(ids).logits, stock(ids, attention_mask=mask).logits]
        hf_posenc.retrofit(stock, "learned")
        logits = [stock(ids).logits, stock(ids, attention_mask=mask).logits]
    assert all(map(torch.equal, logits, expected))


def test_learned_on_llama_equals_stock_with_the_table_added() -> None:
    ids, model = tiny.tokens(2, LENGTH), tiny.model("llama", "learned")
    stock, expected = oracles.stock_with_embeddings("llama", ids, model.model.position_scheme[0].weight)
    assert_equal_models(model, stock, expected, ids, tolerance("llama"))


@by_architecture
def test_none_equals_stock_without_its_positions(architecture: str) -> None:
    ids, stock = tiny.tokens(2, LENGTH), oracles.stock_without_positions(architecture)
    assert_equal_models(tiny.model(architecture, "none"), stock, stock(ids).logits, ids, tolerance(architecture))


def test_none_makes_an_encoder_ignore_order() -> None:
    ids, order = tiny.tokens(1, LENGTH), torch.randperm(LENGTH, generator=torch.Generator().manual_seed(0))
    model, ordered = tiny.model("bert", "none"), tiny.model("bert", "rope")
    torch.testing.assert_close(model(ids[:, order]).logits, model(ids).logits[:, order], rtol=0, atol=1e-10)
    assert (ordered(ids[:, order]).logits - ordered(ids).logits[:, order]).abs().max() > 1e-3
