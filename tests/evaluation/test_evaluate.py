"""Perplexities against plain loops, their intervals, and where models stop."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import hf_posenc
from hf_posenc.evaluation import scoring
from hf_posenc.evaluation.estimates import Estimate, mean, share, student_quantile
from hf_posenc.evaluation.halt import Halt
from hf_posenc.evaluation.lengths import in_tokens, trained_length
from hf_posenc.evaluation.perplexity import measure_length
from hf_posenc.evaluation.settings import Settings
from hf_posenc.evaluation.windows import Frame, cut
from tests.support import evaluation as evaluating
from tests.support import tiny_models as tiny
from tests.support.evaluation import ALONE, subject, text_ids

CAUSAL = ["gpt2", "llama", "bert-decoder"]
# The scores are taken in float32, whatever the model is, so that a bfloat16 model is scored like any other.
SINGLE = {"rel": 1e-5}


def nats(model: Any, ids: torch.Tensor, place: int) -> float:
    """Of the token at a place, from those before it: the slow way."""
    with torch.no_grad():
        logits = model(ids[None, :place]).logits[0, -1].double()
    return -logits.log_softmax(-1)[ids[place]].item()


@pytest.mark.parametrize("architecture", CAUSAL)
@pytest.mark.parametrize("framed", [False, True])
def test_perplexity_is_that_of_a_plain_loop(architecture: str, framed: bool) -> None:
    model, stream, length = tiny.model(architecture), text_ids(100), 20
    found = measure_length(
        subject(model, stream, evaluating.tokenizer(framed)), length, Settings(batch_tokens=60, bins=4), ALONE
    )
    begin = torch.tensor([evaluating.BEGIN] if framed else [], dtype=torch.long)
    body = length - len(begin)
    by_place: dict[int, list[float]] = {}
    for start in range(0, 100 - body + 1, body):
        row = torch.cat([begin, stream[start : start + body]])
        for place in range(1, length):
            by_place.setdefault(place, []).append(nats(model, row, place))
    everything = [one for values in by_place.values() for one in values]
    assert found.perplexity is not None
    assert (found.tokens, found.windows) == (len(everything), 5)
    assert found.perplexity.value == pytest.approx(math.exp(sum(everything) / len(everything)), **SINGLE)
    assert [(part.start, part.end) for part in found.positions] == [(0, 5), (5, 10), (10, 15), (15, 20)]
    for part in found.positions:
        here = [one for place in range(max(part.start, 1), part.end) for one in by_place[place]]
        assert part.tokens == len(here)
        assert part.perplexity.value == pytest.approx(math.exp(sum(here) / len(here)), **SINGLE)
    values = [part.perplexity.value for part in found.positions]
    assert max(values) / min(values) > 1.01  # or a mixture of places would pass


@pytest.mark.parametrize("stride", [1, 3, 8, 12])
@pytest.mark.parametrize("framed", [False, True])
def test_a_sliding_window_is_a_naive_double_loop(stride: int, framed: bool) -> None:
    model, stream, length = tiny.model("llama", "alibi"), text_ids(50), 12
    settings = Settings(stride=stride, batch_tokens=50)
    found = measure_length(subject(model, stream, evaluating.tokenizer(framed)), length, settings, ALONE)
    begin = torch.tensor([evaluating.BEGIN] if framed else [], dtype=torch.long)
    body = length - len(begin)
    step = min(stride, body)
    total, tokens = 0.0, 0
    for target in range(0 if framed else 1, len(stream)):
        start = 0 if target < body else math.ceil((target - body + 1) / step) * step
        if start + body > len(stream) or (target == start and not framed):
            continue  # the last tokens do not fill a window, and the first of one has nothing that leads to it
        row = torch.cat([begin, stream[start : target + 1]])
        total, tokens = total + nats(model, row, len(row) - 1), tokens + 1
    assert found.perplexity is not None
    assert found.tokens == tokens
    assert found.perplexity.value == pytest.approx(math.exp(total / tokens), **SINGLE)
    plain = measure_length(subject(model, stream, evaluating.tokenizer(framed)), length, Settings(), ALONE)
    assert plain.perplexity is not None
    if stride < 8:
        assert abs(plain.perplexity.value / found.perplexity.value - 1) > 1e-3
    assert len(found.losses) == len({start // body for start in range(0, 50 - body + 1, step)})


def test_hidden_tokens_are_guessed_as_in_a_plain_loop() -> None:
    model, stream, length = tiny.model("bert"), text_ids(120), 24
    settings = Settings(mask_share=0.2, batch_tokens=50, bins=3)
    one = subject(model, stream, evaluating.tokenizer(), causal=False)
    found = measure_length(one, length, settings, ALONE)
    from hf_posenc.evaluation.masked import MaskedText

    windows = cut(stream, one.frame, length)
    hidden = MaskedText.of(one, windows, 0.2, 0)
    first = windows.rows([0])[0]
    assert not torch.equal(hidden.places(first, 0), hidden.places(first, 1))
    between = torch.full_like(first, evaluating.END)  # documents that end: nothing to guess there
    between[7] = first[7]
    assert hidden.places(between, 0).nonzero()[:, 0].tolist() == [7]
    total, tokens = 0.0, 0
    for number, start in enumerate(range(0, 120 - 22 + 1, 22)):
        ends = torch.tensor([evaluating.BEGIN]), torch.tensor([evaluating.END])
        row = torch.cat([ends[0], stream[start : start + 22], ends[1]])
        places = hidden.places(row, number)
        assert places.sum() == 4
        assert not places[[0, -1]].any()
        with torch.no_grad():
            logits = model(row.masked_fill(places, evaluating.MASK)[None]).logits[0].log_softmax(-1)
        for place in places.nonzero()[:, 0].tolist():
            total, tokens = total - logits[place, row[place]].item(), tokens + 1
    assert found.perplexity is not None
    assert found.tokens == tokens == 20
    assert found.perplexity.value == pytest.approx(math.exp(total / tokens), **SINGLE)
    batches = measure_length(one, length, Settings(mask_share=0.2, batch_tokens=1, bins=3), ALONE)
    assert batches.losses == pytest.approx(found.losses, rel=1e-5)
    other = measure_length(one, length, Settings(mask_share=0.2, seed=1, bins=3), ALONE)
    assert other.losses != pytest.approx(found.losses, rel=1e-2)
    with pytest.raises(ValueError, match="sliding window is for causal"):
        measure_length(one, length, Settings(stride=4), ALONE)
    with pytest.raises(ValueError, match="no mask token"):
        measure_length(subject(model, stream, None, causal=False), length, Settings(), ALONE)


@pytest.mark.parametrize("architecture", ["gpt2", "llama", "bert", "bert-decoder"])
@pytest.mark.parametrize("scheme", [None, "t5"])
def test_heads_in_parts_give_the_models_own_logits(
    architecture: str, scheme: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scoring, "PLACES_AT_A_TIME", 5)
    model, ids = tiny.model(architecture, scheme), tiny.tokens(3, 12)
    wanted = torch.zeros_like(ids, dtype=torch.bool)
    wanted[0, [1, 4]] = wanted[1, 3:] = wanted[2, 11] = True
    causal = architecture != "bert"
    found = torch.cat(list(scoring.predictions(model, ids, wanted, causal)))
    with torch.no_grad():
        logits = model(ids).logits
    expected = (logits.roll(1, 1) if causal else logits)[wanted].float().log_softmax(-1)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)  # float32 log-probabilities
    with pytest.raises(ValueError, match="first token"):
        list(scoring.predictions(model, ids, torch.ones_like(wanted), causal=True))


def test_bfloat16_is_near(tmp_path: Any) -> None:
    directory = evaluating.checkpoint(tmp_path / "model", "llama")
    wide, narrow = (
        hf_posenc.evaluate(directory, text_ids(200), lengths=[24], dtype=dtype, progress=False).perplexity[0].perplexity
        for dtype in ("float32", "bfloat16")
    )
    assert wide is not None
    assert narrow is not None
    assert narrow.value != wide.value
    assert narrow.value == pytest.approx(wide.value, rel=0.02)  # eight bits of mantissa through three layers


def test_students_quantiles_are_those_of_the_tables() -> None:
    known = {1: 12.7062, 2: 4.30265, 3: 3.18245, 4: 2.77645, 7: 2.36462, 10: 2.22814, 30: 2.04227, 120: 1.97993}
    for freedom, expected in known.items():
        assert student_quantile(0.975, freedom) == pytest.approx(expected, rel=1e-5)
    assert student_quantile(0.95, 5) == pytest.approx(2.01505, rel=1e-5)


def test_the_mean_is_weighted_and_its_interval_that_of_the_textbook() -> None:
    values = torch.tensor([1.0, 2.0, 4.0, 5.0])
    found = mean(values * 10, torch.full((4,), 10), 0.95)
    error = values.std().item() / 2
    assert found.value == pytest.approx(3)
    assert found.low == pytest.approx(3 - student_quantile(0.975, 3) * error)
    assert found.high == pytest.approx(3 + student_quantile(0.975, 3) * error)
    assert mean(torch.tensor([2.0, 30.0]), torch.tensor([1, 3]), 0.9).value == pytest.approx(8)
    assert mean(torch.tensor([2.0]), torch.tensor([1]), 0.9) == Estimate(2.0)
    with pytest.raises(ValueError, match="nothing"):
        mean(torch.zeros(3), torch.zeros(3), 0.9)


@pytest.mark.parametrize("pieces", [3, 12])
def test_intervals_hold_the_truth_as_often_as_they_say(pieces: int) -> None:
    generator = torch.Generator().manual_seed(0)
    counts = torch.randint(50, 60, (2000, pieces), generator=generator)
    losses = 3 + torch.randn(2000, pieces, generator=generator)
    for confidence in (0.5, 0.95):
        found = [mean(loss * count, count, confidence) for loss, count in zip(losses, counts, strict=True)]
        held = sum(one.low < 3 < one.high for one in found if one.low is not None and one.high is not None) / 2000
        assert held == pytest.approx(confidence, abs=0.04)  # three standard errors of 2,000 trials


def test_intervals_shrink_with_the_text() -> None:
    model = tiny.model("gpt2")
    widths = []
    for tokens in (40 * 16, 40 * 64):
        loss = measure_length(subject(model, text_ids(tokens)), 16, Settings(), ALONE).perplexity
        assert loss is not None
        assert loss.low is not None
        assert loss.high is not None
        widths.append(math.log(loss.high / loss.low))
    assert widths[0] / widths[1] == pytest.approx(2, rel=0.3)  # of 40 and 160 windows, drawn at random


def test_shares_of_all_and_none() -> None:
    assert (share(0, 10, 0.95).value, share(0, 10, 0.95).low) == (0, 0)
    assert share(0, 10, 0.95).high == pytest.approx(0.27753, abs=1e-4)
    assert share(10, 10, 0.95).low == pytest.approx(0.72247, abs=1e-4)
    assert share(10, 10, 0.95).high == 1


def test_lengths() -> None:
    assert in_tokens(["0.5x", "1x", 100, "16X"], 48) == (24, 48, 100, 768)
    assert in_tokens(["1x", 48], 48) == (48,)
    for wrong in ("2y", "x", "1.5", "nanx", ""):
        with pytest.raises(ValueError, match="no length"):
            in_tokens([wrong], 48)
    with pytest.raises(ValueError, match="nothing to predict"):
        in_tokens([1], 48)
    with pytest.raises(ValueError, match="at least one"):
        in_tokens([], 48)
    configs = {"a": tiny.config("gpt2"), "b": tiny.config("llama", max_position_embeddings=64)}
    with pytest.raises(ValueError, match="a: 48, b: 64.*--trained-length"):
        trained_length(configs, None)
    assert trained_length(configs, 64) == 64
    assert trained_length({"a": configs["a"]}, None) == 48


@pytest.mark.parametrize(
    ("architecture", "scheme", "reason"),
    [
        ("gpt2", None, "stock gpt2 ends at 48"),
        ("gpt2", "learned", "learned table serves 48"),
        ("bert", None, "stock bert ends at 48"),
        ("bert", "tupe", "tupe table serves 48"),
        ("gpt2", {"type": "learned", "max_positions": 60, "extend": "tile"}, "serves 60"),
    ],
)
def test_a_model_that_ends_says_where_and_why(architecture: str, scheme: Any, reason: str) -> None:
    goes_on = tiny.model(architecture, "alibi", torch.float32)
    ends = tiny.model(architecture, scheme, torch.float32)
    found = hf_posenc.evaluate(
        {"ends": ends, "goes on": goes_on},
        text_ids(300),
        tokenizer=evaluating.tokenizer(),
        lengths=["0.5x", "1x", "2x", "16x"],
        progress=False,
    )
    results = {(one.model, one.length): one for one in found.perplexity}
    assert len(results) == 8
    for length in (24, 48, 96):
        assert results["goes on", length].stop is None
    for length in (24, 48):
        assert results["ends", length].perplexity is not None
    stop = results["ends", 96].stop
    assert stop is not None
    assert reason in stop.reason
    assert stop.reaches == (60 if "60" in reason else 48)
    short = results["goes on", 768].stop
    assert short is not None
    assert short.reaches is None
    assert "does not fill one window" in short.reason
    assert f"ends at {stop.reaches} [1]" in str(found)
    assert f"[1] ends: {stop.reason}" in str(found)


def test_what_is_no_number_and_what_does_not_fit_is_a_halt(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tiny.model("gpt2")
    with torch.no_grad():
        broken.transformer.ln_f.weight.fill_(math.nan)
    with pytest.raises(Halt, match="not numbers"):
        measure_length(subject(broken, text_ids(60)), 20, Settings(), ALONE)

    def no_room(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3 GiB. GPU 0 has ...")

    full = tiny.model("gpt2")
    monkeypatch.setattr(full.base_model, "forward", no_room)
    with pytest.raises(Halt, match="--batch-tokens") as found:
        measure_length(subject(full, text_ids(60)), 20, Settings(), ALONE)
    assert not found.value.lasting


def test_frames_are_what_the_tokenizer_adds() -> None:
    assert Frame.of(evaluating.tokenizer(), causal=False) == Frame((1,), (2,))
    assert Frame.of(evaluating.tokenizer(), causal=True) == Frame((1,), ())
    assert Frame.of(evaluating.tokenizer(framed=False), causal=False) == Frame()
    with pytest.raises(ValueError, match="no room"):
        cut(text_ids(9), Frame((1,), (2,)), 2)


def test_side_by_side_is_piece_by_piece() -> None:
    first, second = (tiny.model("llama", scheme, torch.float32) for scheme in (None, "alibi"))
    found = hf_posenc.evaluate({"a": first, "b": second}, text_ids(400), lengths=[20, 40], progress=False)
    ratios = found.against_first()
    assert set(ratios) == {("b", 20), ("b", 40)}
    values = {(one.model, one.length): one for one in found.perplexity}
    for (_, length), ratio in ratios.items():
        mine, its = values["b", length], values["a", length]
        assert mine.perplexity is not None
        assert its.perplexity is not None
        assert ratio.value == pytest.approx(mine.perplexity.value / its.perplexity.value)
    same = hf_posenc.evaluate({"a": first, "b": first}, text_ids(400), lengths=[20], progress=False)
    assert same.against_first()["b", 20] == Estimate(1.0, 1.0, 1.0)
    assert same.comparable()
    other = evaluating.tokenizer()
    assert first.training is False
    with pytest.raises(ValueError, match="is it its tokenizer"):
        hf_posenc.evaluate(first, [[5, 99]], tokenizer=other, progress=False)
