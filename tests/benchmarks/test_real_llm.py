"""The benchmark that converts a real LLM with the command: its options, its results, and gradient spikes."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from benchmarks.recovery import real_llm
from benchmarks.recovery.plan import recipe_trial
from benchmarks.recovery.real_llm import WARM_UP_STEPS, command, gradient_spike, read_outcome
from benchmarks.recovery.subjects import SMOLLM2, T5_PER_LAYER


def test_a_spike_is_measured_against_the_norms_before_it(tmp_path: Path) -> None:
    assert gradient_spike(tmp_path) is None
    norms = [50.0, *[2.0] * WARM_UP_STEPS, 3.0, 8.0, 1.0]
    history = [{"grad_norm": norm} for norm in norms] + [{"eval_loss": 1.0}]
    (tmp_path / "trainer_state.json").write_text(json.dumps({"log_history": history}))
    assert gradient_spike(tmp_path) == pytest.approx(4.0)


def test_shortfalls_are_relative_to_the_original(tmp_path: Path) -> None:
    original = {"eval_perplexity": 40.0, "self_generated_perplexity": 10.0}
    trained = {"eval_perplexity": 42.0, "self_generated_perplexity": 10.1}
    sizes = {"tokens_unique": 19_968, "tokens_seen": 19_968, "train_seconds": 600.0}
    recovery = {**trained, "original": original, "swapped": {"eval_perplexity": 80.0}, **sizes}
    (tmp_path / "recovery.json").write_text(json.dumps(recovery))
    outcome = read_outcome(recipe_trial(SMOLLM2, T5_PER_LAYER, 20_000), tmp_path)
    assert outcome.shortfalls["real"] == pytest.approx({"swapped": 1.0, "trained": 0.05})
    assert outcome.shortfalls["own"] == pytest.approx({"trained": 0.01})
    assert outcome.tokens_unique == 19_968


def test_the_command_runs_the_trial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "data" / "wikitext-2").mkdir(parents=True)
    (tmp_path / "data" / "wikitext-2" / "test.txt").write_text("text")
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setenv("HF_POSENC_SMOLLM2", str(tmp_path))
    monkeypatch.setattr("benchmarks.recovery.tasks.DATA", tmp_path)
    monkeypatch.setattr(real_llm, "CACHE", tmp_path / "cache")
    trial = recipe_trial(SMOLLM2, T5_PER_LAYER, 20_000)
    words = command(trial, SMOLLM2, tmp_path / "out")
    options = dict(zip(words[4::2], words[5::2], strict=True))
    assert options["--recipe"] == "recommended"
    assert json.loads(options["--scheme"]) == T5_PER_LAYER
    assert (options["--tokens"], options["--passes"]) == ("20000", "1")
    naive = command(dataclasses.replace(trial, method="naive"), SMOLLM2, tmp_path / "out")
    assert naive[naive.index("--recipe") + 1] == "naive"
