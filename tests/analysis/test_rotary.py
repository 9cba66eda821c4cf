"""Rotary decay and frequency use, against closed forms and a loop over pairs of tokens."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from hf_posenc import PosEncError, analysis
from tests.support.tiny_models import HEADS, model, tokens

from .test_embeddings import assert_close


@pytest.mark.parametrize(
    "options", [{}, {"layout": "interleaved", "theta": 300.0}, {"partial_rotary_factor": 0.5}], ids=str
)
def test_rope_decays_as_the_mean_of_cosines(options: dict[str, Any]) -> None:
    subject = analysis.build_model({"type": "rope", **options}, hidden_size=64, num_heads=4)
    decay = analysis.rotary_decay(subject, 100)
    head_size, rotated = 16, int(16 * options.get("partial_rotary_factor", 1.0))
    rates = options.get("theta", 10000.0) ** (-torch.arange(0, rotated, 2, dtype=torch.float64) / rotated)
    by_pair = torch.cos(rates[:, None] * torch.arange(100))
    assert_close(decay.similarity_by_pair, by_pair, 1e-4)
    assert_close(decay.similarity, (2 * by_pair.sum(0) + head_size - rotated) / head_size, 1e-4)
    torch.testing.assert_close(decay.wavelengths, 2 * math.pi / rates, rtol=1e-4, atol=0)


def test_xpos_decays_faster_by_its_scale() -> None:
    scheme = {"type": "xpos", "scale_base": 64}
    decay = analysis.rotary_decay(analysis.build_model(scheme, hidden_size=64, num_heads=4), 50)
    pairs, distance = torch.arange(8, dtype=torch.float64), torch.arange(50)
    zeta = (2 * pairs + 0.4 * 16) / (1.4 * 16)
    rates = 10000.0 ** (-pairs / 8)
    assert_close(
        decay.similarity_by_pair, zeta[:, None] ** (distance / 64) * torch.cos(rates[:, None] * distance), 1e-4
    )


def test_llama_is_measured_by_its_own_rotation() -> None:
    rates = 10000.0 ** (-torch.arange(0, 8, 2, dtype=torch.float64) / 8)
    expected = torch.cos(rates[:, None] * torch.arange(30)).mean(0)
    assert_close(analysis.rotary_decay(model("llama", dtype=torch.float32), 30).similarity, expected, 1e-4)


def test_models_without_rotation_are_rejected() -> None:
    with pytest.raises(analysis.NoRotationError, match="layer 0"):
        analysis.rotary_decay(model("llama", "alibi"), 30)
    rotates_in_one_layer = model("gpt2", {"type": "rope", "layers": [1]})
    with pytest.raises(analysis.NoRotationError):
        analysis.rotary_decay(rotates_in_one_layer, 30, layer=0)
    assert analysis.rotary_decay(rotates_in_one_layer, 30, layer=1).similarity[0] == pytest.approx(1)
    with pytest.raises(PosEncError, match="at least 2"):
        analysis.rotary_decay(analysis.build_model("rope"), 1)


def test_frequency_use_matches_a_loop() -> None:
    """LLaMA's first layer by hand: contributions of all pairs of tokens and features."""
    subject, input_ids = model("llama", dtype=torch.float32), tokens(1, 9)
    result = analysis.rotary_frequencies(subject, input_ids)
    base, layer = subject.model, subject.model.layers[0]
    hidden_states = layer.input_layernorm(base.embed_tokens(input_ids))[0]
    query = layer.self_attn.q_proj(hidden_states).view(9, HEADS, 8)
    key = layer.self_attn.k_proj(hidden_states).view(9, 2, 8)
    magnitudes = torch.zeros(HEADS, 4)
    for head in range(HEADS):
        for i in range(9):
            for j in range(i + 1):
                for pair in range(4):
                    a, b = query[i, head, [pair, pair + 4]].tolist()
                    c, d = key[j, head // 2, [pair, pair + 4]].tolist()
                    angle = (i - j) * 10000.0 ** (-pair / 4)
                    contribution = (a * c + b * d) * math.cos(angle) + (a * d - b * c) * math.sin(angle)
                    magnitudes[head, pair] += abs(contribution)
    assert_close(result.share[0], magnitudes / magnitudes.sum(-1, keepdim=True), 1e-4)
    assert not result.unrotated_share.any()


def test_frequency_use_of_a_partial_rotation_in_one_layer() -> None:
    scheme = {"type": "rope", "partial_rotary_factor": 0.5, "layers": [1]}
    result = analysis.rotary_frequencies(model("gpt2", scheme), tokens(1, 9))
    assert result.layers == (1,)
    assert_close(result.share.sum(-1) + result.unrotated_share, torch.ones(1, HEADS))
    assert (result.unrotated_share > 0).all()
