"""The recovery benchmark: every method sees the same number of tokens, and the page reports the right figures."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.recovery import report, results
from benchmarks.recovery.results import Results, best_learning_rate, tokens_to_reach
from benchmarks.recovery.tasks import Task
from benchmarks.recovery.trial import METHODS, SHORTER, Outcome, Trial, run_trial
from tests.support import tiny_models as tiny

LENGTH, STEPS = 12, 40
FAST_METHODS = ("naive", "recommended")
BY_METHOD = [pytest.param(name, marks=[] if name in FAST_METHODS else [pytest.mark.slow]) for name in METHODS]


def mean_weight(model: Any) -> float:
    """A cheap metric that depends on all weights."""
    with torch.no_grad():
        return sum(parameter.abs().mean().item() for parameter in model.parameters())


def rows() -> dict[str, torch.Tensor]:
    ids = tiny.tokens(64, LENGTH)
    return {"input_ids": ids, "targets": ids}


TASK = Task(
    name="tiny",
    schemes=("rope", "t5"),
    swept_schemes=("t5",),
    learning_rates=(1e-3, 2e-3),
    tokens=STEPS * 4 * LENGTH,
    batch_size=4,
    fit_batch_size=2,
    evaluations=2,
    load=lambda: tiny.model("gpt2", dtype=torch.float32),
    rows=rows,
    measure=lambda: mean_weight,
)


def outcome(
    *values: float, scheme: str = "t5", method: str = "naive", learning_rate: float = 1e-3, seed: int = 0
) -> Outcome:
    curve = [(100 * index, value) for index, value in enumerate(values)]
    return Outcome(Trial("tiny", scheme, method, learning_rate, seed), curve)


@pytest.mark.parametrize("method", BY_METHOD)
def test_every_method_sees_the_same_number_of_tokens(method: str) -> None:
    curve = run_trial(Trial("tiny", "rope", method, 1e-3, 0), TASK).curve
    tokens = [count for count, _ in curve]
    assert tokens == sorted(set(tokens))
    assert abs(tokens[-1] - SHORTER.get(method, 1.0) * TASK.tokens) <= TASK.batch_size * LENGTH  # complete batches
    fits_attention = method not in ("naive", "naive + distillation")
    assert (tokens[0] > 0) == fits_attention  # tokens used for fitting count
    assert curve[0][1] != curve[-1][1]


@pytest.mark.slow
def test_runs_are_reproducible_and_depend_on_the_seed() -> None:
    trial = Trial("tiny", "t5", "recommended", 1e-3, 0)
    first, second = run_trial(trial, TASK), run_trial(trial, TASK)
    assert first.curve == second.curve
    assert run_trial(dataclasses.replace(trial, seed=1), TASK).curve[-1] != first.curve[-1]


def test_tokens_to_reach_a_level_for_good() -> None:
    assert tokens_to_reach(outcome(1.0, 0.5, 0.1, 0.0), 0.3) == 150
    assert tokens_to_reach(outcome(1.0, 0.1, 0.5, 0.1), 0.3) == 250  # reached, lost and reached again
    assert tokens_to_reach(outcome(0.1, 0.1), 0.3) == 0
    assert tokens_to_reach(outcome(1.0, 0.1, 0.5), 0.3) == math.inf
    assert tokens_to_reach(outcome(0.5, math.inf, 0.1), 0.3) == pytest.approx(200)
    assert tokens_to_reach(outcome(0.5, 0.1, math.nan), 0.3) == math.inf


def test_the_best_learning_rate_comes_from_the_sweep() -> None:
    swept = [outcome(1.0, 0.4), outcome(1.0, 0.3, learning_rate=2e-3)]
    others = [outcome(1.0, 0.1, seed=1), outcome(1.0, 0.2, scheme="rope")]
    for scheme in TASK.schemes:
        assert best_learning_rate(TASK, [*swept, *others], scheme, "naive") == 2e-3


def test_the_page_reports_medians_and_fractions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib", reason="the figures need matplotlib")
    monkeypatch.setattr(results, "TASKS", {"tiny": TASK})
    monkeypatch.setattr(report, "TARGETS", {"tiny": 0.15})
    outcomes = [outcome(1.0, 0.6, value, seed=seed) for seed, value in enumerate((0.2, 0.3, 0.5))]
    outcomes += [outcome(1.0, 0.02, 0.0, method="recommended"), outcome(1.0, 0.9, scheme="rope", method="recommended")]
    outcomes.append(outcome(1.0, 0.0, learning_rate=2e-3, seed=1))  # not the best rate of the sweep
    report.write(outcomes, tmp_path / "PAGE.md", tmp_path)
    page = (tmp_path / "PAGE.md").read_text()
    assert "| naive |  | 0.300 (0.200 to 0.500) |" in page
    assert "| recommended | 0.900 | 0.000 |" in page
    fraction = (1 - 0.3) / (1 - 0.02) * 100 / 200
    assert f"| tiny | t5 | {fraction:.3f} |" in page
    assert f"Median over 1: {fraction:.3f}" in page
    assert "| 0.15 | t5 0.000 | rope 0.900 |" in page
    for figure in ("tokens.png", "recovery.png"):
        assert f"]({figure})" in page
        assert (tmp_path / figure).stat().st_size > 10_000


def test_only_runs_with_the_best_learning_rate_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results, "TASKS", {"tiny": TASK})
    reported = Results([outcome(1.0, 0.4), outcome(1.0, 0.3, learning_rate=2e-3), outcome(1.0, 0.1, seed=1)])
    assert [kept.trial.learning_rate for kept in reported.get(TASK, "t5", "naive")] == [2e-3]
