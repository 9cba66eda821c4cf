"""Position embeddings, token clusters and separability, against closed forms and controls."""

from __future__ import annotations

import math

import pytest
import torch

from hf_posenc import PosEncError, analysis
from tests.support.tiny_models import model, tokens


def assert_close(actual: torch.Tensor, expected: torch.Tensor, atol: float = 1e-5) -> None:
    """Schemes compute in float32."""
    torch.testing.assert_close(actual.double(), expected.double(), rtol=0, atol=atol)


def sinusoid(position: int, feature: int, hidden_size: int) -> float:
    angle = position / 10000 ** (feature // 2 * 2 / hidden_size)
    return math.cos(angle) if feature % 2 else math.sin(angle)


def test_sinusoidal_embeddings_match_the_formula() -> None:
    embeddings = analysis.position_embeddings(analysis.build_model("sinusoidal", hidden_size=12, num_heads=2), 9)
    expected = torch.tensor([[sinusoid(position, feature, 12) for feature in range(12)] for position in range(9)])
    assert_close(embeddings.table, expected)


@pytest.mark.parametrize("architecture", ["gpt2", "bert"])
def test_embeddings_of_a_stock_model_are_its_table(architecture: str) -> None:
    stock = model(architecture)
    table = (stock.transformer.wpe if architecture == "gpt2" else stock.bert.embeddings.position_embeddings).weight
    logits, stock_class = stock(tokens()).logits, type(stock)
    assert_close(analysis.position_embeddings(stock, 20).table, table[:20])
    assert type(stock) is stock_class
    assert torch.equal(stock(tokens()).logits, logits)


@pytest.mark.parametrize("mix", ["concat", "attention"])
def test_embeddings_are_read_before_mixing(mix: str) -> None:
    stock, mixed = model("gpt2"), model("gpt2", {"type": "learned", "mix": mix})
    assert_close(analysis.position_embeddings(mixed, 8).table, stock.transformer.wpe.weight[:8])


@pytest.mark.parametrize("scheme", ["rope", "alibi", "none"])
def test_schemes_without_embeddings_are_rejected(scheme: str) -> None:
    with pytest.raises(PosEncError, match="no position embeddings"):
        analysis.position_embeddings(analysis.build_model(scheme))


def test_most_of_the_upper_half_of_sinusoids_is_static() -> None:
    """512 features over 128 positions, by the formula; over 128 times as many positions they do vary."""
    subject = analysis.build_model("sinusoidal", hidden_size=512, num_heads=8, max_positions=16384)
    embeddings = analysis.position_embeddings(subject, 128)
    table = torch.tensor([[sinusoid(i, k, 512) for k in range(512)] for i in range(128)], dtype=torch.float64)
    assert_close(embeddings.ranges, table.amax(0) - table.amin(0), 1e-4)
    assert embeddings.static[256:].float().mean() > 0.6
    assert not embeddings.static[:256].any()
    assert analysis.position_embeddings(subject, 16384).static[256:].float().mean() < 0.2


def test_ranges_of_a_known_table() -> None:
    ramp = torch.arange(5.0)
    table = torch.stack([ramp, torch.zeros(5), 0.01 * ramp, -ramp], dim=1)
    embeddings = analysis.PositionEmbeddings("known", table)
    assert_close(embeddings.ranges, torch.tensor([4.0, 0.0, 0.04, 4.0]))
    assert embeddings.reference_range == 4
    assert embeddings.static.tolist() == [False, True, True, False]


def test_clusters_of_known_size() -> None:
    subject = analysis.build_model("sinusoidal", hidden_size=8, num_heads=2)
    token_embeddings = subject.get_input_embeddings().weight
    with torch.no_grad():
        token_embeddings[:4] = 50 * torch.eye(8)[:4]
    clusters = analysis.token_clusters(subject, [0, 1, 2, 3], length=16, labels=list("abcd"))
    table = analysis.position_embeddings(subject, 16).table.double()
    assert_close(clusters.spread, (table - table.mean(0)).square().sum(-1).mean().sqrt().expand(4), 1e-4)
    assert_close(clusters.nearest_distance, torch.full((4,), 50 * math.sqrt(2)), 1e-3)
    assert clusters.accuracy == 1
    assert clusters.relative_spread < 0.1
    assert 0.5 < clusters.explained_variance <= 1
    with torch.no_grad():
        token_embeddings[:4] *= 1e-3
    assert analysis.token_clusters(subject, [0, 1, 2, 3], length=16).accuracy < 0.5  # positions drown the tokens
    with pytest.raises(PosEncError, match="tokens"):
        analysis.token_clusters(subject, [0, 10**6])
    with pytest.raises(PosEncError, match="labels"):
        analysis.token_clusters(subject, [0, 1], labels=["a"])


def test_separability_with_controls() -> None:
    """Unmixed vectors are separable, a narrow sum is less so, and without positions there is nothing to read."""
    subject = analysis.build_model("sinusoidal", hidden_size=32, num_heads=2)
    added, unmixed = (analysis.separability(subject, unmixed=unmixed) for unmixed in (False, True))
    assert unmixed.position_probe.accuracy == unmixed.token_probe.accuracy == 1
    assert added.position_probe.chance * 5 < added.position_probe.accuracy < 0.9
    assert added.position_probe.control < 0.1
    assert_close(unmixed.angles, torch.full_like(unmixed.angles, 90.0))
    wider = analysis.separability(analysis.build_model("sinusoidal", hidden_size=128, num_heads=2))
    assert wider.position_probe.accuracy > added.position_probe.accuracy
    without = analysis.separability(analysis.build_model("rope", hidden_size=32, num_heads=2))
    assert abs(without.position_probe.accuracy - without.position_probe.chance) < 0.02
    assert (without.mix, without.position_dimension, len(without.angles)) == ("none", 0, 0)
    with pytest.raises(PosEncError, match="at least 4"):
        analysis.separability(subject, length=3)


@pytest.mark.parametrize("mix", ["concat", "attention"])
def test_mixes_that_start_as_a_sum_are_as_separable(mix: str) -> None:
    added, mixed = (
        analysis.separability(analysis.build_model({"type": "sinusoidal", "mix": kind}, hidden_size=32, num_heads=2))
        for kind in ("add", mix)
    )
    assert mixed.mix == mix
    assert abs(added.position_probe.accuracy - mixed.position_probe.accuracy) < 1e-3
    assert_close(added.angles, mixed.angles, 1e-2)
