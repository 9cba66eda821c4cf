"""The recovery benchmark: what is run, at which settings, and what the page says about it."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.recovery import __main__ as recovery
from benchmarks.recovery import plan, report, results
from benchmarks.recovery.figures import draw_figure
from benchmarks.recovery.plan import best_naive, is_selected, naive_grid, planned, recipe_trial
from benchmarks.recovery.results import Results, read_outcomes, write_outcomes
from benchmarks.recovery.subjects import NONE_IN_SOME_LAYERS, SUBJECTS, T5_PER_LAYER, Subject
from benchmarks.recovery.targets import TARGETS, target_rows
from benchmarks.recovery.trial import METHODS, Outcome, Trial, recipe_version, run_trial
from hf_posenc.training.data import IGNORE_INDEX
from tests.support import tiny_models as tiny

LENGTH = 12


def mean_weight(model: Any) -> float:
    """A cheap metric that depends on all weights."""
    with torch.no_grad():
        return sum(parameter.abs().mean().item() for parameter in model.parameters())


SUBJECT = Subject(
    name="tiny",
    about="A tiny model.",
    length=LENGTH,
    hidden_size=32,
    schemes=(("t5", (48, 96)), ("rope", (48, 96))),
    swept_schemes=("t5",),
    naive_budgets=(96,),
    naive_batches=(1, 4),
    naive_rates=(1e-3, 2e-3),
    seconds_per_row=1.0,
    seconds_per_step=1.0,
    texts=("own", "real"),
    load=lambda: tiny.model("llama", dtype=torch.float32),
    rows=lambda: {"input_ids": tiny.tokens(64, LENGTH)},
    measures={"own": lambda: mean_weight, "real": lambda: lambda model: 2 * mean_weight(model)},
    passes=2,
    ablated_schemes=("t5",),
)


def outcome(trial: Trial | None, value: float, **changes: Any) -> Outcome:
    assert trial is not None
    stages = {"swapped": 9.0, "started": 1.0, "trained": value}
    shortfalls = {"own": stages, "real": {**stages, "trained": 2 * value}}
    tokens = trial.tokens
    return Outcome(trial, recipe_version(), tokens, trial.passes * tokens, 3.0, shortfalls, **changes)


def swept(*values: float) -> list[Outcome]:
    """A complete sweep of plain fine-tuning, with values in the order of the grid."""
    grid = naive_grid(SUBJECT, "t5", 96)
    return [outcome(trial, value) for trial, value in zip(grid, (*values, *[9.0] * len(grid)), strict=False)]


@pytest.mark.slow
@pytest.mark.parametrize("method", list(METHODS))
def test_every_stage_is_measured_on_every_text(method: str) -> None:
    done = run_trial(recipe_trial(SUBJECT, "t5", 48, method=method), SUBJECT)
    assert (done.tokens_unique, done.tokens_seen) == (48, 96)
    for text in SUBJECT.texts:
        stages = list(done.shortfalls[text])
        assert stages == (["swapped", "trained"] if method == "naive" else ["swapped", "started", "trained"])
        assert len(set(done.shortfalls[text].values())) == len(stages)


@pytest.mark.slow
def test_runs_are_reproducible_and_depend_on_the_seed() -> None:
    trial = recipe_trial(SUBJECT, "t5", 48)
    first, second = run_trial(trial, SUBJECT), run_trial(trial, SUBJECT)
    assert first.shortfalls == second.shortfalls
    assert run_trial(dataclasses.replace(trial, seed=1), SUBJECT).shortfalls != first.shortfalls


@pytest.mark.slow
@pytest.mark.parametrize("method", ["recipe", "naive"])
def test_only_targets_are_trained(method: str) -> None:
    ids = tiny.tokens(64, LENGTH)
    targets = torch.full_like(ids, IGNORE_INDEX)
    targets[:, -1] = ids[:, 0]
    other = ids.roll(1, 0)
    load = lambda: tiny.model("gpt2", dtype=torch.float32)  # noqa: E731
    trial = recipe_trial(SUBJECT, "t5", 48, method=method)

    def end(labels: torch.Tensor) -> dict[str, dict[str, float]]:
        rows = {"input_ids": ids, "targets": labels}
        return run_trial(trial, dataclasses.replace(SUBJECT, load=load, rows=lambda: rows)).shortfalls

    ignored, changed = targets.clone(), targets.clone()
    changed[:, 3] = other[:, 3]
    assert end(ignored) == end(targets)
    assert end(changed) != end(targets)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["recipe", "naive"])
def test_models_without_a_head_learn_embeddings(method: str) -> None:
    def load() -> Any:
        return tiny.model("bert", dtype=torch.float32).base_model

    subject = dataclasses.replace(SUBJECT, load=load, has_head=False)
    done = run_trial(recipe_trial(subject, "t5", 48, method=method), subject)
    assert done.shortfalls["own"]["trained"] != done.shortfalls["own"]["swapped"]


def test_the_recipe_has_the_settings_of_the_command() -> None:
    trial = recipe_trial(SUBJECTS["stories260k"], "t5", 30_000)
    assert (trial.batch_size, trial.passes, trial.learning_rate) == (1, 10, 1e-3)
    assert recipe_trial(SUBJECTS["SmolLM2"], T5_PER_LAYER, 20_000).passes == 1


def test_plain_fine_tuning_uses_its_best_settings_once_the_sweep_is_complete() -> None:
    outcomes = swept(0.9, 0.3)
    best = naive_grid(SUBJECT, "t5", 96)[1]
    assert best_naive(SUBJECT, "t5", 96, outcomes) == best
    assert best_naive(SUBJECT, "rope", 96, outcomes, seed=1) == dataclasses.replace(best, scheme="rope", seed=1)
    assert best_naive(SUBJECT, "t5", 96, outcomes[:-1]) is None
    assert len(list(planned(SUBJECT, "naive", outcomes))) == 2
    assert not list(planned(SUBJECT, "naive", []))


def test_results_of_other_defaults_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    done = outcome(recipe_trial(SUBJECT, "t5", 48), 0.2)
    assert Results([done], {"tiny": SUBJECT}).get(done.trial) is done
    monkeypatch.setattr(plan, "recipe_version", lambda: "other")
    assert Results([done], {"tiny": SUBJECT}).get(done.trial) is None


def test_the_version_follows_the_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    before = recipe_version()
    monkeypatch.setattr("hf_posenc.training.budget.MIN_STEPS_PER_PASS", 301)
    assert recipe_version() != before


def test_the_tokens_needed_are_those_of_the_smallest_budget_that_is_enough() -> None:
    by_budget = {tokens: recipe_trial(SUBJECT, "t5", tokens) for tokens in (48, 96)}
    outcomes = [*swept(0.3), outcome(by_budget[48], 0.4), outcome(by_budget[96], 0.2)]
    assert Results(outcomes, {"tiny": SUBJECT}).fraction_needed(SUBJECT, "t5") == 1.0
    outcomes[-2] = outcome(by_budget[48], 0.3)
    assert Results(outcomes, {"tiny": SUBJECT}).fraction_needed(SUBJECT, "t5") == 0.5
    assert Results(swept(0.1) + outcomes[-2:], {"tiny": SUBJECT}).fraction_needed(SUBJECT, "t5") == float("inf")
    assert Results(outcomes, {"tiny": SUBJECT}).fraction_needed(SUBJECT, "rope") is None


def test_the_page_shows_what_was_run_and_what_was_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "target_rows", lambda *_: [])
    trial = recipe_trial(SUBJECT, "t5", 48)
    outcomes = [outcome(dataclasses.replace(trial, seed=seed), value) for seed, value in enumerate((0.2, 0.4))]
    page = report.render_page([*outcomes, *swept(0.9, 0.3)], "", {"tiny": SUBJECT})
    spread = "9.000 | 1.000 | 0.300 (0.200 to 0.400) | 0.600 (0.400 to 0.800) | 3 |"
    assert f"| t5 | recipe | 48 | 96 | 1 | 0.0014 | {spread}" in page
    assert "| t5 | recipe | 96 |  |  |  |  |  | not yet run | not yet run |  |" in page
    assert "| t5 | naive | 96 | 192 | 1 | 0.001 | 9.000 | 1.000 | 0.300 | 0.600 | 3 |" in page
    assert "| rope | naive | 96 |  |  |  |  |  | not yet run | not yet run |  |" in page
    assert "| matched biases | not yet run |" in page
    assert "![" in page
    only_ablated = [outcome(plan.ablation(SUBJECT, "t5")["nothing"], 0.2)]
    assert "![" not in report.render_page(only_ablated, "", {"tiny": SUBJECT})


def test_the_figure_needs_runs_of_the_recipe(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the figure needs matplotlib")
    path = tmp_path / "figure.png"
    ablated = outcome(plan.ablation(SUBJECT, "t5")["nothing"], 0.2)
    draw_figure(Results([ablated], {"tiny": SUBJECT}), {"tiny": SUBJECT}, path)
    assert not path.exists()
    complete = [ablated, outcome(recipe_trial(SUBJECT, "t5", 48), 0.2), *swept(0.9)]
    draw_figure(Results(complete, {"tiny": SUBJECT}), {"tiny": SUBJECT}, path)
    assert path.stat().st_size > 5_000


def test_targets_say_whether_they_are_met() -> None:
    stories = SUBJECTS["stories260k"]
    done = [
        outcome(recipe_trial(stories, "t5", 30_000), 0.19),
        outcome(recipe_trial(stories, T5_PER_LAYER, 30_000), 0.1),
    ]
    rows = target_rows(Results(done, SUBJECTS), SUBJECTS)
    assert rows[0] == ["stories260k to t5", "30,000", "<= 0.20", "0.190", "met"]
    assert rows[1][-2:] == ["not yet run", ""]
    assert rows[2][-2:] == ["0.100 with 30,000", "not yet run"]
    assert len(rows) == len(TARGETS) + 3
    assert [row[-2:] for row in rows[-3:]] == [["not yet run", ""]] * 3
    smollm2 = recipe_trial(SUBJECTS["SmolLM2"], NONE_IN_SOME_LAYERS, 20_000)
    noted = outcome(smollm2, 0.1, notes={"answer": "It is Paris.\nReally", "gradient_spike": 25.0})
    rows = target_rows(Results([noted], SUBJECTS), SUBJECTS)
    assert [row[-2:] for row in rows[-3:-1]] == [["It is Paris.", "met"], ["25.0", "missed"]]
    for target in TARGETS:  # each can be measured
        schemes = SUBJECTS[target.subject].schemes
        assert any(scheme == target.scheme and target.tokens in budgets for scheme, budgets in schemes)


def test_estimates_follow_what_was_measured() -> None:
    small, large = (recipe_trial(SUBJECT, "t5", tokens) for tokens in (48, 96))
    guess = plan.estimate(SUBJECT, large, []) - plan.OVERHEAD
    assert guess == 2 * (plan.estimate(SUBJECT, small, []) - plan.OVERHEAD) == 2 * 8 * 2
    assert plan.estimate(SUBJECT, large, [outcome(small, 0.1)]) == plan.OVERHEAD + 2 * 3.0
    slower = outcome(naive_grid(SUBJECT, "t5", 96)[0], 0.1)
    assert plan.estimate(SUBJECT, large, [slower]) == plan.OVERHEAD + guess, "of another method"


def test_selections() -> None:
    trial = recipe_trial(SUBJECTS["stories260k"], T5_PER_LAYER, 30_000)
    for only in (None, ["stories260k"], ["stories260k/t5"], ['stories260k/{"type": "t5", "shared": false}']):
        assert is_selected(trial, only)
    for only in (["MiniLM"], ["stories260k/alibi"]):
        assert not is_selected(trial, only)


def test_results_are_read_as_they_were_written(tmp_path: Path) -> None:
    outcomes = [outcome(recipe_trial(SUBJECT, T5_PER_LAYER, 48), float("inf"), notes={"answer": "Paris"})]
    write_outcomes(outcomes, tmp_path / "results.json")
    assert read_outcomes(tmp_path / "results.json") == outcomes


@pytest.mark.slow
def test_a_run_is_planned_resumed_and_stopped_in_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib", reason="the figure needs matplotlib")
    monkeypatch.setattr(recovery, "HERE", tmp_path)
    monkeypatch.setattr(recovery, "PAGE", tmp_path / "PAGE.md")
    monkeypatch.setattr(recovery, "SUBJECTS", {"tiny": SUBJECT})
    monkeypatch.setattr(recovery, "ORDER", [("recipe", "tiny")])
    monkeypatch.setattr(report, "SUBJECTS", {"tiny": SUBJECT})
    monkeypatch.setattr(report, "target_rows", lambda *_: [])
    path = tmp_path / "results.json"
    monkeypatch.setattr(recovery, "read_outcomes", lambda: read_outcomes(path))
    monkeypatch.setattr(recovery, "write_outcomes", lambda outcomes: write_outcomes(outcomes, path))

    def run_here(trials: list[Trial], subject: Subject, label: str, outcomes: list[Outcome], *_: Any) -> None:
        for trial in trials[:2]:
            recovery._keep(run_trial(trial, subject), outcomes)

    recovery.main(["--list"])
    assert "4 runs" in capsys.readouterr().out
    assert not path.exists()
    monkeypatch.setattr(recovery, "_run_in_pool", run_here)
    recovery.main(["--only", "tiny/t5"])
    assert len(read_outcomes(path)) == 2
    assert (tmp_path / report.FIGURE).stat().st_size > 5_000
    assert f"]({report.FIGURE})" in (tmp_path / "PAGE.md").read_text()
    recovery.main(["--only", "tiny"])
    assert len(read_outcomes(path)) == 4
    assert results.RESULTS.name == path.name


def test_no_run_is_started_that_would_end_too_late() -> None:
    trial = recipe_trial(SUBJECT, "t5", 48)
    outcomes: list[Outcome] = []
    recovery._run_in_pool([trial], SUBJECT, "tiny", outcomes, workers=1, deadline=0.0)
    assert not outcomes
