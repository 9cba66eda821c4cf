"""The benchmark of recovery is fair: every method has the same tokens, and the page says what was measured."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.recovery import report, results
from benchmarks.recovery.results import Results, best_rate, tokens_until
from benchmarks.recovery.subjects import Subject
from benchmarks.recovery.trial import METHODS, SHORTER, Outcome, Trial, run
from tests.support import tiny_models as tiny

LENGTH = 12


def measured(model: Any) -> float:
    """Some number that depends on the weights."""
    with torch.no_grad():
        return sum(parameter.abs().mean().item() for parameter in model.parameters())


def rows() -> dict[str, torch.Tensor]:
    ids = tiny.tokens(64, LENGTH)
    return {"input_ids": ids, "targets": ids}


TINY = Subject(
    name="tiny",
    schemes=("rope", "t5"),
    swept=("t5",),
    rates=(1e-3, 2e-3),
    tokens=100 * 4 * LENGTH,
    rows_at_once=4,
    fit_rows=4,
    evaluations=2,
    load=lambda: tiny.model("gpt2", dtype=torch.float32),
    rows=rows,
    measure=lambda: measured,
)


def outcome(*values: float, scheme: str = "t5", method: str = "naive", rate: float = 1e-3, seed: int = 0) -> Outcome:
    curve = [(100 * place, value) for place, value in enumerate(values)]
    return Outcome(Trial("tiny", scheme, method, rate, seed), curve)


@pytest.mark.parametrize("method", METHODS)
def test_every_method_sees_as_many_tokens(method: str) -> None:
    found = run(Trial("tiny", "rope", method, 1e-3, 0), TINY)
    tokens = [count for count, _ in found.curve]
    assert tokens == sorted(set(tokens))
    assert abs(tokens[-1] - SHORTER.get(method, 1.0) * TINY.tokens) <= TINY.rows_at_once * LENGTH  # whole batches
    fitted = method not in ("naive", "naive + teacher", "handover", "handover + teacher")
    assert (tokens[0] > 0) == fitted  # what attention was fitted on has been seen when training begins
    assert found.curve[0][1] != found.curve[-1][1]


def test_seeds_differ_and_can_be_had_again() -> None:
    trial = Trial("tiny", "t5", "recommended", 1e-3, 0)
    first, again = run(trial, TINY), run(trial, TINY)
    assert first.curve == again.curve
    assert run(dataclasses.replace(trial, seed=1), TINY).curve[-1] != first.curve[-1]


def test_tokens_are_counted_until_a_level_holds() -> None:
    assert tokens_until(outcome(1.0, 0.5, 0.1, 0.0), 0.3) == 150
    assert tokens_until(outcome(1.0, 0.1, 0.5, 0.1), 0.3) == 250  # reached and lost again does not count
    assert tokens_until(outcome(0.1, 0.1), 0.3) == 0
    assert tokens_until(outcome(1.0, 0.1, 0.5), 0.3) == math.inf
    assert tokens_until(outcome(0.5, math.inf, 0.1), 0.3) == pytest.approx(200)
    assert tokens_until(outcome(0.5, 0.1, math.nan), 0.3) == math.inf


def test_the_best_rate_is_taken_from_the_sweep() -> None:
    swept = [outcome(1.0, 0.4), outcome(1.0, 0.3, rate=2e-3)]
    repeated = [outcome(1.0, 0.1, seed=1), outcome(1.0, 0.2, scheme="rope")]  # neither is of the sweep
    for scheme in TINY.schemes:
        assert best_rate(TINY, [*swept, *repeated], scheme, "naive") == 2e-3


def test_page_says_medians_and_shares(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib", reason="the page's pictures need matplotlib")
    monkeypatch.setattr(results, "SUBJECTS", {"tiny": TINY})
    monkeypatch.setattr(report, "AIMS", {"tiny": 0.15})
    outcomes = [outcome(1.0, 0.6, end, seed=seed) for seed, end in enumerate((0.2, 0.3, 0.5))]
    outcomes += [outcome(1.0, 0.02, 0.0, method="recommended"), outcome(1.0, 0.9, scheme="rope", method="recommended")]
    outcomes.append(outcome(1.0, 0.0, rate=2e-3, seed=1))  # not the rate that did best in the sweep
    report.write(outcomes, tmp_path / "PAGE.md", tmp_path)
    page = (tmp_path / "PAGE.md").read_text()
    assert "| naive |  | 0.300 (0.200 to 0.500) |" in page
    assert "| recommended | 0.900 | 0.000 |" in page
    share = (1 - 0.3) / (1 - 0.02) * 100 / 200
    assert f"| tiny | t5 | {share:.3f} |" in page
    assert f"Median over 1: {share:.3f} (aim: at most 0.1, not met)." in page
    assert "| 0.15 | t5 0.000 | rope 0.900 |" in page
    for picture in ("tokens.png", "recovery.png"):
        assert f"]({picture})" in page
        assert (tmp_path / picture).stat().st_size > 10_000


def test_results_that_do_not_count_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results, "SUBJECTS", {"tiny": TINY})
    found = Results([outcome(1.0, 0.4), outcome(1.0, 0.3, rate=2e-3), outcome(1.0, 0.1, seed=1)])
    assert [kept.trial.rate for kept in found.of(TINY, "t5", "naive")] == [2e-3]
