"""Passkeys, order and likeness: with models that are known to find, to ignore order, or to be the same."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

import hf_posenc
from hf_posenc.evaluation.halt import Halt
from hf_posenc.evaluation.order import block_ends, measure_order, shuffled_places
from hf_posenc.evaluation.passkey import LEAD, NUMBERS, TOKENS, Haystack, measure_passkey, outcomes
from hf_posenc.evaluation.settings import Settings
from hf_posenc.evaluation.similarity import agreement, measure_similarity
from tests.support import evaluation as evaluating
from tests.support import tiny_models as tiny
from tests.support.evaluation import ALONE, FIRST_OTHER, Copycat, subject, text_ids

DIGITS = {"words": evaluating.tokenizer(framed=False, digits=True)}


def test_a_model_that_looks_back_finds_every_key_and_one_that_does_not_finds_none() -> None:
    settings = Settings(depths=(0.0, 0.5, 1.0), trials=6, batch_tokens=200)
    found = measure_passkey(subject(Copycat(), text_ids(500), **DIGITS), 60, settings, ALONE)
    assert found.keys == NUMBERS
    assert [cell.depth for cell in found.depths] == [0, 0.5, 1]
    assert all(cell.accuracy.value == 1 and cell.preference.value == 1 and cell.rank == 1 for cell in found.depths)
    assert all(cell.accuracy.low is not None and 0.5 < cell.accuracy.low < 1 for cell in found.depths)
    near = measure_passkey(subject(Copycat(sees=25), text_ids(500), **DIGITS), 60, settings, ALONE)
    assert [cell.accuracy.value for cell in near.depths] == [0, 0, 1]
    assert near.depths[0].rank > 1
    assert near.depths[0].log_probability < near.depths[2].log_probability
    blind = measure_passkey(subject(Copycat(sees=2), text_ids(500), **DIGITS), 60, settings, ALONE)
    assert [cell.accuracy.value for cell in blind.depths] == [0, 0, 0]


def test_found_is_what_greedy_decoding_writes() -> None:
    one = subject(Copycat(sees=30), text_ids(500), **DIGITS)
    hay = Haystack.of(one, 5)
    trials = [hay.trial(60, depth, f"{depth} {number}") for depth in (0.0, 0.6, 0.7, 1.0) for number in range(4)]
    written = []
    for trial in trials:
        ids = trial.ids[: -len(trial.key)]
        for _ in trial.key:
            ids = [*ids, one.model.next(ids)]
        written.append(ids == trial.ids)
    assert [outcome.found for outcome in outcomes(one, trials)] == written
    assert len(set(written)) == 2


def test_half_a_key_is_not_found() -> None:
    class Forgetful(Copycat):
        """Knows how a key begins, and no more."""

        def next(self, ids: list[int]) -> int:
            return super().next(ids) if ids[-1] < FIRST_OTHER + len(LEAD.split()) else 0

    found = measure_passkey(subject(Forgetful(), text_ids(500), **DIGITS), 60, Settings(trials=4), ALONE)
    assert all(cell.accuracy.value == 0 and cell.rank > 1 for cell in found.depths)
    assert any(cell.preference.value > 0.5 for cell in found.depths)


@pytest.mark.parametrize("architecture", ["gpt2", "llama"])
def test_ranks_and_probabilities_are_those_of_the_logits(architecture: str) -> None:
    model = tiny.model(architecture)
    one = subject(model, text_ids(200), evaluating.tokenizer(digits=True))
    hay = Haystack.of(one, 3)
    trials = [hay.trial(40, 0.3, str(number)) for number in range(5)]
    for trial, outcome in zip(trials, outcomes(one, trials), strict=True):
        assert len(trial.ids) == 40
        assert trial.ids[0] == evaluating.BEGIN
        with torch.no_grad():
            logits = model(torch.tensor([trial.ids])).logits[0, -1 - len(trial.key) : -1].log_softmax(-1)
        own = [row[token].item() for row, token in zip(logits, trial.key, strict=True)]
        ranks = [int((row > row[token]).sum()) + 1 for row, token in zip(logits, trial.key, strict=True)]
        assert outcome.log_probabilities == pytest.approx(sum(own), rel=1e-5)
        assert outcome.log_ranks == pytest.approx(sum(math.log(rank) for rank in ranks))
        fork = trial.parting
        assert trial.key[:fork] == trial.other[:fork]
        assert outcome.preferred == bool(logits[fork, trial.key[fork]] > logits[fork, trial.other[fork]])


def test_keys_stand_where_they_should_and_any_tokenizer_will_do() -> None:
    for words, kind in ((DIGITS["words"], NUMBERS), (evaluating.tokenizer(), TOKENS), (None, TOKENS)):
        hay = Haystack.of(subject(Copycat(), text_ids(300), words), 5)
        assert hay.kind == kind
        starts = []
        for depth in (0.0, 0.5, 1.0):
            trial = hay.trial(80, depth, "seed")
            assert len(trial.ids) == 80
            assert trial.ids[-len(trial.key) :] == trial.key
            needle = [*hay.lead, *trial.key, *hay.close]
            places = [n for n in range(80 - len(needle)) if trial.ids[n : n + len(needle)] == needle]
            starts.append(places[0])
        room = 80 - len(hay.before) - len(needle) - len(hay.lead) - len(trial.key)
        assert starts == [len(hay.before), len(hay.before) + round(room / 2), len(hay.before) + room]
        assert hay.trial(80, 0.5, "seed") == hay.trial(80, 0.5, "seed")
        assert hay.trial(80, 0.5, "seed") != hay.trial(80, 0.5, "other")
        with pytest.raises(Halt, match="no room"):
            hay.trial(6, 0.5, "seed")


def test_passkeys_are_for_models_that_write() -> None:
    encoder = subject(tiny.model("bert"), text_ids(100), evaluating.tokenizer(), causal=False)
    with pytest.raises(Halt, match="does not write"):
        measure_passkey(encoder, 40, Settings(), ALONE)


def test_shuffled_places_stay_in_their_block_and_leave_what_is_kept() -> None:
    text = torch.ones(23, dtype=torch.bool)
    text[[0, 22]] = False
    kept = torch.zeros(23, dtype=torch.bool)
    kept[[5, 6, 13]] = True
    order = shuffled_places(text, kept, 7, "seed")
    assert sorted(order.tolist()) == list(range(23))
    assert order[[0, 5, 6, 13, 22]].tolist() == [0, 5, 6, 13, 22]
    for start in (1, 8, 15):
        assert sorted(order[start : start + 7].tolist()) == list(range(start, start + 7))
    assert (order != torch.arange(23)).sum() > 8
    assert block_ends(text, 7).nonzero()[:, 0].tolist() == [7, 14, 21]
    assert block_ends(text, 21).nonzero()[:, 0].tolist() == [21]


def test_an_encoder_without_positions_does_not_mind_shuffling() -> None:
    """What it predicts is the same to the rounding of sums in another order; with positions it is not."""
    words, stream = evaluating.tokenizer(), text_ids(400)
    settings = Settings(blocks=(4, None))
    without = measure_order(subject(tiny.model("bert", "none"), stream, words, causal=False), 40, settings, ALONE)
    for shuffle in without.shuffles:
        assert shuffle.increase.value == pytest.approx(0, abs=1e-5)
        assert shuffle.loss.value > 1
    stock = subject(tiny.model("bert"), stream, words, causal=False)
    for shuffle in measure_order(stock, 40, settings, ALONE).shuffles:
        assert abs(shuffle.increase.value) > 1e-3


def test_shuffling_a_causal_model_is_a_plain_loop() -> None:
    model, stream = tiny.model("gpt2"), text_ids(100)
    found = measure_order(subject(model, stream), 24, Settings(blocks=(5, None), batch_tokens=50), ALONE)
    for shuffle in found.shuffles:
        size = 24 if shuffle.block is None else 6
        before = after = tokens = 0.0
        for number in range(4):
            row = stream[24 * number :][:24]
            ends = block_ends(torch.ones(24, dtype=torch.bool), size)
            order = shuffled_places(torch.ones(24, dtype=torch.bool), ends, size, f"0 {shuffle.block} {number}")
            for place in range(size - 1, 24, size):
                assert set(row[order][place - size + 1 : place].tolist()) == set(row[place - size + 1 : place].tolist())
                with torch.no_grad():
                    before -= model(row[None]).logits[0, place - 1].log_softmax(-1)[row[place]].item()
                    after -= model(row[order][None]).logits[0, place - 1].log_softmax(-1)[row[place]].item()
                tokens += 1
        assert shuffle.tokens == tokens
        assert shuffle.loss.value == pytest.approx(before / tokens, rel=1e-5)
        assert shuffle.increase.value == pytest.approx((after - before) / tokens, rel=1e-3, abs=1e-6)
        assert abs(shuffle.increase.value) > 1e-3


def test_likeness_to_oneself_and_to_another() -> None:
    words, stream = evaluating.tokenizer(), text_ids(300)
    mine, other = tiny.model("bert"), tiny.model("bert", "none")
    one = subject(mine, stream, words, causal=False)
    same = measure_similarity(one, subject(mine, stream, words, causal=False), 40, Settings(), ALONE)
    assert same.cosine is not None
    assert (same.cosine.value, same.agreement, same.windows) == (pytest.approx(1), pytest.approx(1), 7)
    found = measure_similarity(subject(other, stream, words, causal=False), one, 40, Settings(batch_tokens=90), ALONE)
    cosines = []
    for start in range(0, 300 - 38 + 1, 38):
        row = torch.tensor([[evaluating.BEGIN, *stream[start : start + 38].tolist(), evaluating.END]])
        with torch.no_grad():
            first, second = (model.bert(row).last_hidden_state[0].mean(0) for model in (mine, other))
        cosines.append(nn.functional.cosine_similarity(first, second, dim=0).item())
    assert found.cosine is not None
    assert found.cosine.value == pytest.approx(sum(cosines) / len(cosines))
    assert found.cosine.value < 0.999


def test_agreement_does_not_mind_a_turn() -> None:
    generator = torch.Generator().manual_seed(0)
    points = torch.randn(12, 8, generator=generator, dtype=torch.float64)
    turn, _ = torch.linalg.qr(torch.randn(8, 8, generator=generator, dtype=torch.float64))
    assert agreement(points, points @ turn) == pytest.approx(1)
    assert abs(agreement(points, torch.randn(12, 8, generator=generator, dtype=torch.float64))) < 0.6


def test_an_original_that_ends_is_named() -> None:
    words = evaluating.tokenizer()
    found = hf_posenc.evaluate(
        {"variant": tiny.model("bert", "alibi")},
        text_ids(300),
        original=tiny.model("bert"),
        tokenizer=words,
        measures=["similarity"],
        lengths=["1x", "2x"],
        progress=False,
    )
    first, second = found.similarity
    assert first.cosine is not None
    assert (first.original, first.stop) == ("original", None)
    assert second.stop is not None
    assert "the original, original: the position table" in second.stop.reason
    assert "likeness of embeddings" in str(found)


def test_a_model_without_a_head_has_embeddings_only() -> None:
    from transformers import BertModel

    bare: Any = BertModel(tiny.config("bert")).eval()
    found = hf_posenc.evaluate(
        bare, text_ids(100), measures=["perplexity", "similarity"], lengths=[20], tokenizer=evaluating.tokenizer(),
        progress=False,
    )  # fmt: skip
    assert found.perplexity[0].stop is not None
    assert "no head" in found.perplexity[0].stop.reason
    assert found.similarity[0].cosine is not None
