"""The numbers of hf_posenc.analysis: against closed forms, known answers, and controls that must fail."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.models.t5.modeling_t5 import T5Attention

import hf_posenc
from hf_posenc import analysis
from hf_posenc.analysis.subspaces import participation, projected_to_plane, random_angles
from hf_posenc.schemes.alibi import alibi_slopes
from tests.support.cases import CASES
from tests.support.tiny_models import HEADS, LAYERS, TRAINED_LENGTH, WIDTH, model, tokens


def close(found: torch.Tensor, right: torch.Tensor, atol: float = 1e-5) -> None:
    """Schemes compute in float32."""
    torch.testing.assert_close(found.double(), right.double(), rtol=0, atol=atol)


def sinusoid(position: int, feature: int, width: int) -> float:
    angle = position / 10000 ** (feature // 2 * 2 / width)
    return math.cos(angle) if feature % 2 else math.sin(angle)


def test_the_encoding_is_the_table_of_the_formula() -> None:
    found = analysis.encoding(analysis.scheme_model("sinusoidal", width=12, heads=2), 9)
    close(found.table, torch.tensor([[sinusoid(i, k, 12) for k in range(12)] for i in range(9)]))


@pytest.mark.parametrize("architecture", ["gpt2", "bert"])
def test_the_encoding_of_a_stock_model_is_its_own_table(architecture: str) -> None:
    stock = model(architecture)
    table = (stock.transformer.wpe if architecture == "gpt2" else stock.bert.embeddings.position_embeddings).weight
    before, kind = stock(tokens()).logits, type(stock)
    found = analysis.encoding(stock, 20)
    close(found.table, table[:20])
    assert type(stock) is kind
    assert torch.equal(stock(tokens()).logits, before)


@pytest.mark.parametrize("mix", ["concat", "attention"])
def test_the_encoding_is_before_the_mix(mix: str) -> None:
    stock, mixed = model("gpt2"), model("gpt2", {"type": "learned", "mix": mix})
    close(analysis.encoding(mixed, 8).table, stock.transformer.wpe.weight[:8])


def test_where_there_is_no_encoding_it_says_where_to_look() -> None:
    for scheme in ("rope", "alibi", "none"):
        with pytest.raises(ValueError, match="look at"):
            analysis.encoding(analysis.scheme_model(scheme))


def test_most_of_the_upper_half_of_sinusoids_hardly_moves() -> None:
    """Width 512 over 128 positions: by the formula, and not so over 128 times as many."""
    subject = analysis.scheme_model("sinusoidal", width=512, heads=8, max_positions=16384)
    found = analysis.movement(analysis.encoding(subject, 128))
    table = torch.tensor([[sinusoid(i, k, 512) for k in range(512)] for i in range(128)], dtype=torch.float64)
    close(found.ranges, table.amax(0) - table.amin(0), 1e-4)
    assert found.still_upper > 0.6
    assert found.still[:256].sum() == 0
    longer = analysis.movement(analysis.encoding(subject, 16384))
    assert longer.still_upper < 0.2 < found.still_upper


def test_movement_of_a_table_that_is_known() -> None:
    table = torch.stack([torch.arange(5.0), torch.zeros(5), 0.01 * torch.arange(5.0), -torch.arange(5.0)], dim=1)
    found = analysis.movement(analysis.Encoding("known", table), still=0.1)
    close(found.ranges, torch.tensor([4.0, 0.0, 0.04, 4.0]))
    assert found.still.tolist() == [False, True, True, False]
    assert abs(found.moving - 2) < 1e-3
    assert participation(torch.zeros(3)) == 0
    with pytest.raises(ValueError, match="still"):
        analysis.movement(analysis.Encoding("known", table), still=1.5)


def t5_bucket(distance: int, buckets: int, farthest: int, both_ways: bool) -> int:
    """T5's formula, one distance at a time; edges fall where float32 has them for these numbers."""
    first = 0
    if both_ways:
        buckets //= 2
        first, distance = (buckets if distance > 0 else 0), abs(distance)
    else:
        distance = max(-distance, 0)
    exact = buckets // 2
    if distance < exact:
        return first + distance
    far = exact + int(math.log(distance / exact) / math.log(farthest / exact) * (buckets - exact) + 1e-6)
    return first + min(far, buckets - 1)


@pytest.mark.parametrize("causal", [True, False])
def test_t5_rows_are_those_of_the_reference_formula(causal: bool) -> None:
    subject = analysis.scheme_model({"type": "t5", "num_buckets": 16, "max_distance": 40}, causal=causal)
    found = analysis.relative_rows(subject, 70)
    right = [[t5_bucket(j - i, 16, 40, not causal) for j in range(70)] for i in range(70)]
    assert found.index.tolist() == right
    assert found.exact == (7 if causal else 3)
    ahead = torch.arange(70) - torch.arange(70)[:, None]
    theirs = T5Attention._relative_position_bucket(ahead, bidirectional=not causal, num_buckets=16, max_distance=40)
    assert torch.equal(found.index, theirs)


def test_shaw_rows_are_clipped() -> None:
    found = analysis.relative_rows(analysis.scheme_model({"type": "shaw", "max_distance": 3}), 10)
    assert found.index.tolist() == [[3 + min(max(i - j, -3), 3) for j in range(10)] for i in range(10)]
    assert (found.used, found.exact) == (7, 2)
    with pytest.raises(ValueError, match="rows by distance"):
        analysis.relative_rows(analysis.scheme_model("alibi"))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("heads", [4, 6])
def test_alibi_is_slope_times_distance(causal: bool, heads: int) -> None:
    found = analysis.bias_by_distance(analysis.scheme_model("alibi", width=48, heads=heads, causal=causal), 20)
    assert found.distances.tolist() == list(range(-19, 1 if causal else 20))
    close(found.values, -torch.tensor(alibi_slopes(heads))[:, None] * found.distances.abs())
    assert found.query is None


def test_a_trained_bias_is_read_off_its_layer() -> None:
    subject = model("gpt2", {"type": "kerple"})
    for layer in range(LAYERS):
        kernel = subject.transformer.h[layer].attn.position_scheme["0"]
        found = analysis.bias_by_distance(subject, 12, layer)
        close(found.values, -kernel.p[:, None] * torch.log1p(kernel.a[:, None] * found.distances.abs()))
    with pytest.raises(ValueError, match="layer 3"):
        analysis.bias_by_distance(subject, 12, LAYERS)


def test_a_bias_of_positions_is_seen_from_a_query() -> None:
    subject = model("gpt2", "fire")
    network = subject.transformer.h[0].attn.position_scheme["0"]
    found = analysis.bias_by_distance(subject, 12, query=7)
    assert (found.query, found.distances.tolist()) == (7, list(range(-7, 1)))
    right = network(found.distances[None, None], torch.tensor([[7]]), torch.float64)[0, :, 0]
    close(found.values, right)
    assert analysis.bias_by_distance(subject, 12).query == 11
    with pytest.raises(ValueError, match="from 0 to 11"):
        analysis.bias_by_distance(subject, 12, query=12)


def test_a_term_of_words_is_no_bias() -> None:
    for scheme in ("shaw", "cope", "rope", "sinusoidal"):
        with pytest.raises(ValueError, match="attention by distance"):
            analysis.bias_by_distance(analysis.scheme_model(scheme))
    assert "start neutral" in str(analysis.bias_by_distance(analysis.scheme_model("t5")))
    assert analysis.bias_by_distance(model("gpt2", "transformer_xl"), 9).query is None


@pytest.mark.parametrize(
    "options", [{}, {"layout": "interleaved", "theta": 300.0}, {"partial_rotary_factor": 0.5}], ids=str
)
def test_rope_decays_as_the_mean_of_cosines(options: dict[str, Any]) -> None:
    subject = analysis.scheme_model({"type": "rope", **options}, width=64, heads=4)
    found = analysis.decay(subject, 100)
    size, turned = 16, int(16 * options.get("partial_rotary_factor", 1.0))
    rates = options.get("theta", 10000.0) ** (-torch.arange(0, turned, 2, dtype=torch.float64) / turned)
    by_pair = torch.cos(rates[:, None] * torch.arange(100))
    close(found.by_pair, by_pair, 1e-4)
    close(found.similarity, (2 * by_pair.sum(0) + size - turned) / size, 1e-4)
    torch.testing.assert_close(found.wavelengths, 2 * math.pi / rates, rtol=1e-4, atol=0)


def test_xpos_decays_faster_by_its_own_factor() -> None:
    found = analysis.decay(analysis.scheme_model({"type": "xpos", "scale_base": 64}, width=64, heads=4), 50)
    pairs, far = torch.arange(8, dtype=torch.float64), torch.arange(50)
    zeta = (2 * pairs + 0.4 * 16) / (1.4 * 16)
    rates = 10000.0 ** (-pairs / 8)
    close(found.by_pair, zeta[:, None] ** (far / 64) * torch.cos(rates[:, None] * far), 1e-4)


def test_llama_turns_by_its_own_angles_and_alibi_by_none() -> None:
    stock = model("llama", dtype=torch.float32)
    rates = 10000.0 ** (-torch.arange(0, 8, 2, dtype=torch.float64) / 8)
    close(analysis.decay(stock, 30).similarity, torch.cos(rates[:, None] * torch.arange(30)).mean(0), 1e-4)
    with pytest.raises(ValueError, match="nothing is turned"):
        analysis.decay(model("llama", "alibi"))
    waiting = {"type": "rope", "handover": {"from": "stock", "steps": 10}}
    with pytest.raises(ValueError, match="nothing is turned"):
        analysis.decay(model("gpt2", waiting), 30)
    halfway = {"type": "rope", "handover": {"from": "stock", "steps": 10, "step": 5, "shape": "linear"}}
    slower = torch.cos(0.5 * rates[:, None] * torch.arange(30)).mean(0)
    close(analysis.decay(model("gpt2", halfway), 30).similarity, slower, 1e-4)


@pytest.mark.parametrize("scheme", [None, "t5", {"type": "shaw", "max_distance": 4}], ids=str)
@pytest.mark.parametrize("architecture", ["bert", "gpt2", "llama"])
def test_attention_by_distance_is_that_of_an_eager_model(architecture: str, scheme: Any) -> None:
    subject, ids = model(architecture, scheme), tokens(3, 13)
    found = analysis.attention_by_distance(subject, ids)
    assert subject.config._attn_implementation == "sdpa"
    subject.set_attn_implementation("eager")
    weights = torch.stack(subject(ids, output_attentions=True).attentions).detach()
    assert found.share.shape[:2] == (LAYERS, HEADS)
    for place, distance in enumerate(found.distances.tolist()):
        diagonal = weights.diagonal(distance, dim1=-2, dim2=-1)
        close(found.mean[..., place], diagonal.mean((1, 3)), 1e-6)
        close(found.share[..., place], diagonal.sum((1, 3)) / (3 * 13), 1e-6)
    assert len(found.distances) == (25 if architecture == "bert" else 13)
    close(found.share.sum(-1), torch.ones(LAYERS, HEADS))
    names, shares = found.binned()
    assert names == ["0", "1", "2-3", "4-7", "8-12"]
    close(shares.sum(-1), torch.ones(LAYERS, HEADS))
    close(found.reach, (found.share * found.distances.abs()).sum(-1))


def test_tokens_of_another_vocabulary_are_refused() -> None:
    for look, architecture in ((analysis.attention_by_distance, "gpt2"), (analysis.frequencies, "llama")):
        with pytest.raises(ValueError, match="one tokenizer"):
            look(model(architecture), tokens(2, 9) + 1000)


def test_attention_by_distance_leaves_the_model_as_it_was() -> None:
    subject = model("gpt2").train()
    subject.transformer.h[1].eval()
    modes, kind = [module.training for module in subject.modules()], type(subject)
    analysis.attention_by_distance(subject, tokens())
    analysis.clouds(subject, 4, length=5)
    with pytest.raises(ValueError, match="nothing is turned"):
        analysis.frequencies(subject, tokens())
    assert modes == [module.training for module in subject.modules()]
    assert type(subject) is kind
    assert not any(module._forward_hooks for module in subject.modules())
    with pytest.raises(ValueError, match="rows, tokens"):
        analysis.attention_by_distance(subject, tokens()[0])
    with pytest.raises(ValueError, match="not a model that hf_posenc knows"):
        analysis.attention_by_distance(torch.nn.Linear(2, 2), tokens())


def test_the_use_of_frequencies_is_that_of_a_loop() -> None:
    """Queries and keys of LLaMA's first layer by hand: the parts add up to the logits, and have these magnitudes."""
    subject, ids = model("llama", dtype=torch.float32), tokens(1, 9)
    found = analysis.frequencies(subject, ids)
    base, layer = subject.model, subject.model.layers[0]
    states = layer.input_layernorm(base.embed_tokens(ids))[0]
    query = layer.self_attn.q_proj(states).view(9, HEADS, 8)
    key = layer.self_attn.k_proj(states).view(9, 2, 8)
    magnitudes = torch.zeros(HEADS, 4)
    for head in range(HEADS):
        for i in range(9):
            for j in range(i + 1):
                for pair in range(4):
                    a, b = query[i, head, [pair, pair + 4]].tolist()
                    c, d = key[j, head // 2, [pair, pair + 4]].tolist()
                    angle = (i - j) * 10000.0 ** (-pair / 4)
                    part = (a * c + b * d) * math.cos(angle) + (a * d - b * c) * math.sin(angle)
                    magnitudes[head, pair] += abs(part)
    close(found.share[0], magnitudes / magnitudes.sum(-1, keepdim=True), 1e-4)
    assert not found.unturned.any()
    partial = analysis.frequencies(model("gpt2", {"type": "rope", "partial_rotary_factor": 0.5, "layers": [1]}), ids)
    assert partial.layers == (1,)
    close(partial.share.sum(-1) + partial.unturned, torch.ones(1, HEADS))
    assert (partial.unturned > 0).all()


def test_probes_find_what_is_there_and_nothing_where_nothing_is() -> None:
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(8, (4000,), generator=generator)
    fitted = torch.arange(4000) % 2 == 0
    noise = torch.randn(4000, 20, generator=generator)
    along = torch.outer(labels.double(), torch.randn(20, generator=generator).double())
    there = analysis.linear_probe(along + 0.01 * noise, labels, fitted, classes=8)
    assert there.accuracy > 0.99  # in line: those in the middle as well
    assert there.control < 0.25
    nothing = analysis.linear_probe(noise, labels, fitted, classes=8)
    assert abs(nothing.accuracy - nothing.chance) < 0.03
    with pytest.raises(ValueError, match="fitted"):
        analysis.linear_probe(noise, labels, torch.ones(4000, dtype=torch.bool), classes=8)


def test_principal_angles_of_known_subspaces() -> None:
    eye = torch.eye(5, dtype=torch.float64)
    tilted = math.cos(0.3) * eye[:, 1] + math.sin(0.3) * eye[:, 3]
    found = analysis.principal_angles(eye[:, :2], torch.stack([eye[:, 0], tilted, eye[:, 4]], dim=1))
    close(found, torch.tensor([0.0, math.degrees(0.3)]), 1e-6)
    close(analysis.principal_angles(eye[:, :2], eye[:, 2:4]), torch.full((2,), 90.0))
    small = torch.stack([eye[:, 0] * math.cos(1e-9) + eye[:, 1] * math.sin(1e-9)], dim=1)
    close(analysis.principal_angles(eye[:, :1], small), torch.tensor([math.degrees(1e-9)]), 1e-12)
    assert random_angles(400, 2, 2).min() > 75


def test_effective_dimensions_and_directions() -> None:
    corners = torch.eye(6)[:4].repeat(3, 1) - torch.eye(6)[:4].mean(0)
    assert abs(analysis.effective_dimension(corners) - 3) < 1e-6
    assert analysis.leading_directions(corners, 0.99).shape == (6, 3)
    with pytest.raises(ValueError, match="the same"):
        analysis.leading_directions(torch.ones(4, 3))
    line, share = projected_to_plane(torch.outer(torch.arange(4.0), torch.ones(1)))
    assert line.shape == (4, 2)
    assert abs(share - 1) < 1e-9


def test_word_and_position_are_told_apart_or_not() -> None:
    """Side by side there is nothing to confuse; a narrow sum confuses; without positions there is none to find."""
    subject = analysis.scheme_model("sinusoidal", width=32, heads=2)
    added, beside = (analysis.separation(subject, side_by_side=side) for side in (False, True))
    assert beside.position.accuracy == beside.token.accuracy == 1
    assert added.position.chance * 5 < added.position.accuracy < 0.9
    assert added.position.control < 0.1
    close(beside.angles, torch.full_like(beside.angles, 90.0))
    wider = analysis.separation(analysis.scheme_model("sinusoidal", width=128, heads=2))
    assert wider.position.accuracy > added.position.accuracy
    silent = analysis.separation(analysis.scheme_model("rope", width=32, heads=2))
    assert abs(silent.position.accuracy - silent.position.chance) < 0.02
    assert (silent.mix, silent.position_dimension, len(silent.angles)) == ("none", 0, 0)


@pytest.mark.parametrize("mix", ["concat", "attention"])
def test_a_mix_that_starts_as_the_sum_is_measured_as_the_sum(mix: str) -> None:
    added, mixed = (
        analysis.separation(analysis.scheme_model({"type": "sinusoidal", "mix": kind}, width=32, heads=2))
        for kind in ("add", mix)
    )
    assert mixed.mix == mix
    assert abs(added.position.accuracy - mixed.position.accuracy) < 1e-3
    close(added.angles, mixed.angles, 1e-2)


def test_clouds_of_known_size() -> None:
    subject = analysis.scheme_model("sinusoidal", width=8, heads=2)
    words = subject.get_input_embeddings().weight
    with torch.no_grad():
        words[:4] = 50 * torch.eye(8)[:4]
    found = analysis.clouds(subject, [0, 1, 2, 3], length=16, labels=list("abcd"))
    table = analysis.encoding(subject, 16).table.double()
    spread = (table - table.mean(0)).square().sum(-1).mean().sqrt()
    close(found.within, spread.expand(4), 1e-4)
    close(found.nearest, torch.full((4,), 50 * math.sqrt(2)), 1e-3)
    assert found.own == 1
    assert found.ratio < 0.1
    with torch.no_grad():
        words[:4] *= 1e-3
    assert analysis.clouds(subject, [0, 1, 2, 3], length=16).own < 0.5  # the control: words drowned by positions
    with pytest.raises(ValueError, match="tokens"):
        analysis.clouds(subject, [0, 10**6])
    with pytest.raises(ValueError, match="labels"):
        analysis.clouds(subject, [0, 1], labels=["one"])


@pytest.mark.parametrize("case", [case for case in CASES if not case.sampled], ids=lambda case: case.id)
def test_every_scheme_can_be_looked_at(case: Any) -> None:
    """Each function gives finite numbers for a scheme, or says in a ValueError that there is nothing of the kind."""
    subject = analysis.scheme_model(case.scheme, width=32, heads=4, layers=3, max_positions=48, causal=True)
    seen = 0
    for look in (analysis.encoding, analysis.relative_rows, analysis.bias_by_distance, analysis.decay):
        try:
            found = look(subject, 24)
        except ValueError as error:
            assert str(error)
            continue
        seen += 1
        assert str(found)
        for value in vars(found).values():
            assert not isinstance(value, torch.Tensor) or value.double().isfinite().all()
    assert seen or case.id in ("none", "cope")
    assert analysis.attention_by_distance(subject, tokens(1, 24) % 32).share.isfinite().all()


def test_checkpoints(tmp_path: Path) -> None:
    model("gpt2", dtype=torch.float32).save_pretrained(tmp_path / "stock")
    model("gpt2", "t5", dtype=torch.float32).save_pretrained(tmp_path / "variant")
    stock = analysis.checkpoint_model(tmp_path / "stock")
    assert stock.config.position_scheme == "learned"
    assert analysis.encoding(stock, 48).table.shape == (TRAINED_LENGTH, WIDTH)
    assert analysis.bias_by_distance(analysis.checkpoint_model(tmp_path / "variant"), 9).values.any()
    assert analysis.bias_by_distance(analysis.checkpoint_model(tmp_path / "stock", "alibi"), 9).values.any()
    with pytest.raises(ValueError, match="no checkpoint"):
        analysis.checkpoint_model(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="serves 48 positions"):
        analysis.encoding(stock, TRAINED_LENGTH + 1)


def test_reached_from_the_package() -> None:
    assert hf_posenc.analysis is analysis
    assert set(analysis.__all__) <= set(dir(analysis))
    with pytest.raises(ValueError, match="multiple"):
        analysis.scheme_model("rope", width=10, heads=4)
