"""Attention, bias and table lookups by distance, against closed forms, reference code and eager attention."""

from __future__ import annotations

import math

import pytest
import torch
from transformers.models.t5.modeling_t5 import T5Attention

from hf_posenc import PosEncError, analysis
from hf_posenc.schemes.distance_functions import alibi_slopes
from tests.support.tiny_models import HEADS, LAYERS, model, tokens

from .test_embeddings import assert_close


@pytest.mark.parametrize("scheme", [None, "t5", {"type": "shaw", "max_distance": 4}], ids=str)
@pytest.mark.parametrize("architecture", ["bert", "gpt2", "llama"])
def test_attention_matches_an_eager_model(architecture: str, scheme: str | dict | None) -> None:
    subject, input_ids = model(architecture, scheme), tokens(3, 13)
    result = analysis.attention_by_distance(subject, input_ids)
    assert subject.config._attn_implementation == "sdpa"
    subject.set_attn_implementation("eager")
    weights = torch.stack(subject(input_ids, output_attentions=True).attentions).detach()
    assert result.share.shape[:2] == (LAYERS, HEADS)
    for index, distance in enumerate(result.distances.tolist()):
        diagonal = weights.diagonal(distance, dim1=-2, dim2=-1)
        assert_close(result.share[..., index], diagonal.sum((1, 3)) / (3 * 13), 1e-6)
    assert len(result.distances) == (25 if architecture == "bert" else 13)
    labels, shares = result.binned()
    assert labels == ["0", "1", "2-3", "4-7", "8-12"]
    assert_close(shares.sum(-1), torch.ones(LAYERS, HEADS))
    assert_close(shares[..., 2], result.share[..., (result.distances.abs() - 2.5).abs() < 1].sum(-1))
    assert_close(result.mean_distance, (result.share * result.distances.abs()).sum(-1))


def test_models_are_left_as_they_were() -> None:
    subject = model("gpt2").train()
    subject.transformer.h[1].eval()
    modes, model_class = [module.training for module in subject.modules()], type(subject)
    analysis.attention_by_distance(subject, tokens())
    analysis.token_clusters(subject, 4, length=5)
    with pytest.raises(analysis.NoRotationError):
        analysis.rotary_frequencies(subject, tokens())
    assert modes == [module.training for module in subject.modules()]
    assert type(subject) is model_class
    assert not any(module._forward_hooks for module in subject.modules())


def test_wrong_inputs_are_rejected() -> None:
    with pytest.raises(PosEncError, match="rows, tokens"):
        analysis.attention_by_distance(model("gpt2"), tokens()[0])
    with pytest.raises(PosEncError, match="Linear with a NoneType is not supported"):
        analysis.attention_by_distance(torch.nn.Linear(2, 2), tokens())
    for measure, architecture in ((analysis.attention_by_distance, "gpt2"), (analysis.rotary_frequencies, "llama")):
        with pytest.raises(PosEncError, match="share a tokenizer"):
            measure(model(architecture), tokens(2, 9) + 1000)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("num_heads", [4, 6])
def test_alibi_is_slope_times_distance(causal: bool, num_heads: int) -> None:
    subject = analysis.build_model("alibi", hidden_size=48, num_heads=num_heads, causal=causal)
    bias = analysis.bias_by_distance(subject, 20)
    assert bias.distances.tolist() == list(range(-19, 1 if causal else 20))
    assert_close(bias.values, -torch.tensor(alibi_slopes(num_heads))[:, None] * bias.distances.abs())
    assert bias.query is None


def test_bias_is_read_from_the_given_layer() -> None:
    subject = model("gpt2", {"type": "kerple"})
    for layer in range(LAYERS):
        kernel = subject.transformer.h[layer].attn.position_scheme["0"]
        bias = analysis.bias_by_distance(subject, 12, layer)
        assert_close(bias.values, -kernel.p[:, None] * torch.log1p(kernel.a[:, None] * bias.distances.abs()))
    with pytest.raises(PosEncError, match="layer 3"):
        analysis.bias_by_distance(subject, 12, LAYERS)


def test_bias_that_depends_on_the_query_position() -> None:
    subject = model("gpt2", "fire")
    params = dict(subject.transformer.h[0].attn.position_scheme["0"].named_parameters())
    bias = analysis.bias_by_distance(subject, 8)
    assert (bias.query, bias.distances.tolist()) == (7, list(range(-7, 1)))
    rate, reach = params["rate"], params["length"].clamp(min=7)
    relative = torch.log1p(rate * bias.distances.abs()) / torch.log1p(rate * reach)
    hidden = torch.relu(params["inner_weight"][:, None] * relative + params["inner_bias"][:, None])
    assert_close(bias.values, params["outer_weight"] @ hidden + params["outer_bias"][:, None])
    assert analysis.bias_by_distance(subject, 12).query == 11
    assert analysis.bias_by_distance(model("bert", "fire"), 12).query == 6


def test_content_dependent_terms_are_not_a_bias() -> None:
    for scheme in ("shaw", "cope", "rope", "sinusoidal"):
        with pytest.raises(PosEncError, match="attention_by_distance"):
            analysis.bias_by_distance(analysis.build_model(scheme))
    assert "neutral" in str(analysis.bias_by_distance(analysis.build_model("t5")))
    assert analysis.bias_by_distance(model("gpt2", "transformer_xl"), 9).query is None


def t5_bucket(distance: int, num_buckets: int, max_distance: int, bidirectional: bool) -> int:
    """T5's formula for one distance; the epsilon puts bucket edges where float32 has them for these numbers."""
    offset = 0
    if bidirectional:
        num_buckets //= 2
        offset, distance = (num_buckets if distance > 0 else 0), abs(distance)
    else:
        distance = max(-distance, 0)
    exact = num_buckets // 2
    if distance < exact:
        return offset + distance
    scale = math.log(distance / exact) / math.log(max_distance / exact)
    return offset + min(exact + int(scale * (num_buckets - exact) + 1e-6), num_buckets - 1)


@pytest.mark.parametrize("causal", [True, False])
def test_t5_buckets_match_the_formula_and_transformers(causal: bool) -> None:
    subject = analysis.build_model({"type": "t5", "num_buckets": 16, "max_distance": 40}, causal=causal)
    buckets = analysis.relative_buckets(subject, 70)
    assert buckets.index.tolist() == [[t5_bucket(j - i, 16, 40, not causal) for j in range(70)] for i in range(70)]
    assert buckets.max_exact_distance == (7 if causal else 3)
    distances = torch.arange(70) - torch.arange(70)[:, None]
    expected = T5Attention._relative_position_bucket(
        distances, bidirectional=not causal, num_buckets=16, max_distance=40
    )
    assert torch.equal(buckets.index, expected)


def test_shaw_rows_are_clipped() -> None:
    buckets = analysis.relative_buckets(analysis.build_model({"type": "shaw", "max_distance": 3}), 10)
    assert buckets.index.tolist() == [[3 + min(max(i - j, -3), 3) for j in range(10)] for i in range(10)]
    assert (buckets.num_used, buckets.max_exact_distance) == (7, 2)
    with pytest.raises(PosEncError, match="indexed by distance"):
        analysis.relative_buckets(analysis.build_model("alibi"))
