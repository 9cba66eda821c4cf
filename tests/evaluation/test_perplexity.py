"""Perplexity against plain loops, for causal, sliding-window and masked evaluation."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

import hf_posenc
from hf_posenc.errors import PosEncError
from hf_posenc.evaluation import models as evaluation_models
from hf_posenc.evaluation.metrics import evaluate_perplexity
from hf_posenc.evaluation.results import EvaluationStopped
from tests.support import tiny_models as tiny
from tests.support.evaluation import (
    BOS,
    EOS,
    MASK,
    evaluated_model,
    make_tokenizer,
    random_ids,
    save_checkpoint,
)
from tests.support.sampling import combinations

FLOAT32 = {"rel": 1e-5}
"""Log-probabilities are computed in float32 whatever the dtype of the model."""


def token_loss(model: Any, ids: torch.Tensor, position: int) -> float:
    """Loss of one token given those before it, from a forward pass of its own."""
    with torch.no_grad():
        logits = model(ids[None, :position]).logits[0, -1].double()
    return -logits.log_softmax(-1)[ids[position]].item()


@combinations(architecture=["gpt2", "llama", "bert-decoder"], special_tokens=[False, True])
def test_perplexity_matches_a_plain_loop(architecture: str, special_tokens: bool) -> None:
    model, token_ids, length = tiny.model(architecture), random_ids(100), 20
    evaluated = evaluated_model(model, token_ids, make_tokenizer(special_tokens), batch_tokens=60, position_bins=4)
    result = evaluate_perplexity(evaluated, length)
    prefix = torch.tensor([BOS] if special_tokens else [], dtype=torch.long)
    text_length = length - len(prefix)
    losses: dict[int, list[float]] = {}
    for start in range(0, 100 - text_length + 1, text_length):
        window = torch.cat([prefix, token_ids[start : start + text_length]])
        for position in range(1, length):
            losses.setdefault(position, []).append(token_loss(model, window, position))
    every_loss = [loss for values in losses.values() for loss in values]
    assert result.perplexity is not None
    assert (result.num_tokens, result.num_windows) == (len(every_loss), 5)
    assert result.perplexity.value == pytest.approx(math.exp(sum(every_loss) / len(every_loss)), **FLOAT32)
    assert [(bin_.start, bin_.end) for bin_ in result.positions] == [(0, 5), (5, 10), (10, 15), (15, 20)]
    for bin_ in result.positions:
        expected = [loss for position in range(max(bin_.start, 1), bin_.end) for loss in losses[position]]
        assert bin_.num_tokens == len(expected)
        assert bin_.perplexity.value == pytest.approx(math.exp(sum(expected) / len(expected)), **FLOAT32)
    values = [bin_.perplexity.value for bin_ in result.positions]
    assert max(values) / min(values) > 1.01  # otherwise mixing up the bins would pass


@combinations(stride=[1, 3, 8, 12], special_tokens=[False, True])
def test_sliding_window_matches_a_double_loop(stride: int, special_tokens: bool) -> None:
    model, token_ids, length = tiny.model("llama", "alibi"), random_ids(50), 12
    tokenizer = make_tokenizer(special_tokens)
    evaluated = evaluated_model(model, token_ids, tokenizer, stride=stride, batch_tokens=50)
    result = evaluate_perplexity(evaluated, length)
    prefix = torch.tensor([BOS] if special_tokens else [], dtype=torch.long)
    text_length = length - len(prefix)
    step = min(stride, text_length)
    total, num_tokens = 0.0, 0
    for target in range(0 if special_tokens else 1, len(token_ids)):
        start = 0 if target < text_length else math.ceil((target - text_length + 1) / step) * step
        if start + text_length > len(token_ids) or (target == start and not special_tokens):
            continue  # an incomplete window at the end, or a token without context
        window = torch.cat([prefix, token_ids[start : target + 1]])
        total, num_tokens = total + token_loss(model, window, len(window) - 1), num_tokens + 1
    assert result.perplexity is not None
    assert result.num_tokens == num_tokens
    assert result.perplexity.value == pytest.approx(math.exp(total / num_tokens), **FLOAT32)
    adjacent = evaluate_perplexity(evaluated_model(model, token_ids, tokenizer), length)
    assert adjacent.perplexity is not None
    if stride < 8:
        assert abs(adjacent.perplexity.value / result.perplexity.value - 1) > 1e-3
    assert len(result.segment_losses) == len({start // text_length for start in range(0, 50 - text_length + 1, step)})


def test_masked_perplexity_matches_a_plain_loop() -> None:
    model, token_ids, length = tiny.model("bert"), random_ids(120), 24
    settings = {"mlm_probability": 0.2, "batch_tokens": 50, "position_bins": 3}
    evaluated = evaluated_model(model, token_ids, make_tokenizer(), causal=False, **settings)
    result = evaluate_perplexity(evaluated, length)
    windows = evaluated.windows(length)
    total, num_tokens = 0.0, 0
    for index, start in enumerate(range(0, 120 - 22 + 1, 22)):
        window = torch.cat([torch.tensor([BOS]), token_ids[start : start + 22], torch.tensor([EOS])])
        (input_ids,), (targets,), (masked,) = evaluated.prepare_inputs(windows, [index], torch.empty(0))
        assert torch.equal(targets, window)
        assert torch.equal(input_ids, window.masked_fill(masked, MASK))
        assert masked.sum() == 4
        assert not masked[[0, -1]].any()
        with torch.no_grad():
            log_probs = model(input_ids[None]).logits[0].log_softmax(-1)
        for position in masked.nonzero()[:, 0].tolist():
            total, num_tokens = total - log_probs[position, window[position]].item(), num_tokens + 1
    assert result.perplexity is not None
    assert result.num_tokens == num_tokens == 20
    assert result.perplexity.value == pytest.approx(math.exp(total / num_tokens), **FLOAT32)


def test_masking_depends_on_the_seed_and_not_on_batches() -> None:
    def segment_losses(**changes: Any) -> tuple[float, ...]:
        settings = {"mlm_probability": 0.2, **changes}
        evaluated = evaluated_model(tiny.model("bert"), random_ids(120), make_tokenizer(), causal=False, **settings)
        return evaluate_perplexity(evaluated, 24).segment_losses

    assert segment_losses(batch_tokens=1) == pytest.approx(segment_losses(), rel=1e-5)
    assert segment_losses(seed=1) != pytest.approx(segment_losses(), rel=1e-2)


def test_special_tokens_between_documents_are_not_masked() -> None:
    token_ids = torch.full((22,), EOS)
    token_ids[6] = 9
    evaluated = evaluated_model(tiny.model("bert"), token_ids, make_tokenizer(), causal=False)
    _, _, masked = evaluated.prepare_inputs(evaluated.windows(24), [0], torch.empty(0))
    assert masked[0].nonzero()[:, 0].tolist() == [7]


def test_masked_models_need_a_mask_token_and_no_stride() -> None:
    model, token_ids = tiny.model("bert"), random_ids(60)
    sliding = evaluated_model(model, token_ids, make_tokenizer(), causal=False, stride=4)
    with pytest.raises(PosEncError, match="stride"):
        evaluate_perplexity(sliding, 24)
    without_tokenizer = evaluated_model(model, token_ids, None, causal=False)
    with pytest.raises(PosEncError, match="mask token"):
        evaluate_perplexity(without_tokenizer, 24)


@pytest.mark.parametrize("architecture", ["gpt2", "llama", "bert", "bert-decoder"])
@pytest.mark.parametrize("scheme", [None, "t5"])
def test_chunked_log_probs_are_those_of_the_model(
    architecture: str, scheme: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evaluation_models, "TOKENS_PER_CHUNK", 5)
    model, ids = tiny.model(architecture, scheme), tiny.tokens(3, 12)
    scored = torch.zeros_like(ids, dtype=torch.bool)
    scored[0, [1, 4]] = scored[1, 3:] = scored[2, 11] = True
    causal = architecture != "bert"
    evaluated = evaluated_model(model, ids.flatten(), causal=causal)
    chunks = list(evaluated.log_probs(ids, scored))
    assert max(map(len, chunks)) == 5
    with torch.no_grad():
        logits = model(ids).logits
    expected = (logits.roll(1, 1) if causal else logits)[scored].float().log_softmax(-1)
    torch.testing.assert_close(torch.cat(chunks), expected, rtol=0, atol=1e-5)  # float32 log-probabilities
    if causal:
        with pytest.raises(AssertionError, match="first token"):
            list(evaluated.log_probs(ids, torch.ones_like(scored)))


def test_bfloat16_is_close_to_float32(tmp_path: Path) -> None:
    directory = save_checkpoint(tmp_path / "model", "llama")
    reports = [
        hf_posenc.evaluate(directory, random_ids(200), lengths=[24], dtype=dtype, progress=False)
        for dtype in ("float32", "bfloat16")
    ]
    wide, narrow = (report.perplexity[0].perplexity.value for report in reports)
    assert narrow != wide
    assert narrow == pytest.approx(wide, rel=0.02)  # eight bits of mantissa through three layers


def test_intervals_shrink_with_more_text() -> None:
    model = tiny.model("gpt2")
    widths = []
    for num_tokens in (40 * 16, 40 * 64):
        evaluated = evaluated_model(model, random_ids(num_tokens))
        result = evaluate_perplexity(evaluated, 16)
        low, high = result.perplexity.confidence_interval
        widths.append(math.log(high / low))
    assert widths[0] / widths[1] == pytest.approx(2, rel=0.3)  # four times as many windows, drawn at random


@pytest.mark.parametrize(
    ("architecture", "scheme", "max_length"),
    [
        ("gpt2", None, 48),
        ("bert", None, 48),
        ("gpt2", {"type": "learned", "max_positions": 60, "extend": "tile"}, 60),
        pytest.param("gpt2", "learned", 48, marks=pytest.mark.slow),
        pytest.param("bert", "tupe", 48, marks=pytest.mark.slow),
    ],
)
def test_a_model_with_a_length_limit_reports_it(architecture: str, scheme: Any, max_length: int) -> None:
    unlimited = tiny.model(architecture, "alibi", torch.float32)
    limited = tiny.model(architecture, scheme, torch.float32)
    report = hf_posenc.evaluate(
        {"limited": limited, "unlimited": unlimited},
        random_ids(300),
        tokenizer=make_tokenizer(),
        lengths=["0.5x", "1x", "2x", "16x"],
        progress=False,
    )
    results = {(result.model, result.length): result for result in report.perplexity}
    assert len(results) == 8
    for length in (24, 48, 96):
        assert results["unlimited", length].stopped is None
    for length in (24, 48):
        assert results["limited", length].perplexity is not None
    stopped = results["limited", 96].stopped
    assert stopped is not None
    assert str(max_length) in stopped.reason
    assert stopped.max_length == max_length
    too_little_text = results["unlimited", 768].stopped
    assert too_little_text is not None
    assert too_little_text.max_length is None
    assert "768" in too_little_text.reason
    assert f"stops at {max_length} [1]" in str(report)
    assert f"[1] limited: {stopped.reason}" in str(report)


def test_nan_and_out_of_memory_stop_the_evaluation(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tiny.model("gpt2")
    with torch.no_grad():
        broken.transformer.ln_f.weight.fill_(math.nan)
    with pytest.raises(EvaluationStopped, match="NaN"):
        evaluate_perplexity(evaluated_model(broken, random_ids(60)), 20)

    def out_of_memory(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3 GiB. GPU 0 has ...")

    model = tiny.model("gpt2")
    monkeypatch.setattr(model.base_model, "forward", out_of_memory)
    with pytest.raises(EvaluationStopped, match="--batch-tokens") as error:
        evaluate_perplexity(evaluated_model(model, random_ids(60)), 20)
    assert not error.value.permanent


def test_a_bug_is_not_taken_for_a_length_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    def bug(*_: Any, **__: Any) -> None:
        raise ValueError("a bug")

    model = tiny.model("gpt2")
    monkeypatch.setattr(model.base_model, "forward", bug)
    with pytest.raises(ValueError, match="a bug"):
        evaluate_perplexity(evaluated_model(model, random_ids(60)), 20)


def test_out_of_memory_is_not_a_length_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    def hidden_states(self: Any, input_ids_BN: torch.Tensor) -> torch.Tensor:
        if input_ids_BN.shape[1] < 48:
            raise EvaluationStopped("out of memory", permanent=False)
        raise EvaluationStopped("too long", refused=True)

    monkeypatch.setattr(evaluation_models.EvaluatedModel, "hidden_states", hidden_states)
    assert evaluated_model(tiny.model("gpt2"), random_ids(60)).max_length(96) == 47
