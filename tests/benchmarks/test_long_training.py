"""The benchmark of longer inputs with little training: a small GPT-2, seeds, resuming, and the page."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import long_training, long_training_gpt2


@pytest.fixture
def tiny_gpt2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> long_training.Subject:
    """A GPT-2 with 16 positions, trained for two steps on a text of four characters."""
    (tmp_path / "data" / "tinyshakespeare").mkdir(parents=True)
    (tmp_path / "data" / "tinyshakespeare" / "input.txt").write_text("to be\nor not to be? " * 100)
    monkeypatch.setattr("benchmarks.recovery.tasks.DATA", tmp_path)
    settings = {"TRAINED_LENGTH": 16, "LAYERS": 1, "WIDTH": 8, "HEADS": 2, "STEPS": 2, "ROWS_PER_STEP": 2}
    for name, value in {**settings, "HELD_OUT": 256, "CACHE": tmp_path / "cache"}.items():
        monkeypatch.setattr(long_training_gpt2, name, value)
    return long_training.Subject(16, long_training_gpt2.load, long_training_gpt2.text)


@pytest.mark.slow
def test_gpt2_learns_long_positions_on_short_rows(tiny_gpt2: long_training.Subject) -> None:
    table = {"type": "learned", "max_positions": 64, "extend": "interpolate"}
    run = long_training.Run(table, length=16, steps=2, rows_per_step=2, pose=True, subject=tiny_gpt2, learning_rate=0.1)
    result, other_seed = run.execute(), run.execute(seed=1)
    assert result["tokens"] == run.tokens == 64
    assert list(result["quality"]) == ["1x", "2x", "4x"], "the table reaches four times the length"
    assert result["quality"] != other_seed["quality"]
    assert result["quality"] == run.execute()["quality"], "the trained model is cached, and a seed repeats"
    assert result["quality"] != dataclasses.replace(run, pose=False).execute()["quality"]
    assert result["quality"] != dataclasses.replace(run, steps=0).execute()["quality"]
    assert run.estimate() > 0


def test_training_and_held_out_text_are_disjoint(tiny_gpt2: long_training.Subject) -> None:
    train, held_out = tiny_gpt2.text(True), tiny_gpt2.text(False)
    assert (len(train), len(held_out)) == (2000 - 256, 256)
    assert torch.cat([train, held_out]).unique().tolist() == list(range(int(train.max()) + 1))


def operations(run: long_training.Run) -> float:
    """Operations of the layers: 12 width^2 weights, and causal attention over half a row, forward and backward."""
    width, layers = long_training_gpt2.WIDTH, long_training_gpt2.LAYERS
    return run.tokens * 6 * layers * (12 * width**2 + width * run.length)


def test_gpt2_runs_differ_in_rows_and_steps() -> None:
    long, pose, plain, _ = long_training.GPT2_RUNS.values()
    assert dataclasses.replace(pose, pose=False, steps=plain.steps) == plain
    assert dataclasses.replace(plain, length=4 * plain.length) == long
    assert long.tokens == 4 * plain.tokens
    assert 0.24 < operations(pose) / operations(long) <= 0.25, "PoSE gets a quarter of the compute"
    assert pose.subject.trained_length == pose.length


def result(perplexity: float) -> dict[str, Any]:
    quality = {multiple: {"perplexity": perplexity, "interval": [1.0, 2.0]} for multiple in long_training.LENGTHS}
    return {"tokens": 1000, "cpu_seconds": 7, "quality": quality}


def test_seeds_are_averaged() -> None:
    name = "GPT-2: PoSE, rows of 128 characters"
    results = {name: result(4.0), f"{name}, seed 2": result(5.0)}
    row = next(row for row in long_training.quality_table(results, long_training.GPT2_RUNS) if row[0] == name)
    assert row == [name, *["4.50 (4.00 to 5.00)"] * 3, "1,000", "7"]
    assert f"Seeds: {name} 2; one for all others." in long_training.render_page(results)


def test_runs_in_the_results_file_are_not_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    executed = []

    @dataclasses.dataclass(frozen=True)
    class Run(long_training.Run):
        def execute(self, seed: int = 0) -> dict[str, Any]:
            executed.append((self.scheme, seed))
            return result(4.0)

        def estimate(self) -> float:
            return 5.0

    names = list(long_training.RUNS)
    runs = {name: Run(name, seeds=2 if index == 1 else 1) for index, name in enumerate(names)}
    monkeypatch.setattr(long_training, "RUNS", runs)
    monkeypatch.setattr(long_training, "RESULTS", tmp_path / "results.json")
    monkeypatch.setattr(long_training, "PAGE", tmp_path / "page.md")
    monkeypatch.setattr(long_training, "start_worker", lambda: None)
    (tmp_path / "results.json").write_text(json.dumps({names[1]: result(3.0)}))
    long_training.main(["--only", "*512 tokens", "--estimate"])
    assert not executed
    for _ in range(2):
        long_training.main(["--only", names[0], names[1]])
    assert executed == [(names[0], 0), (names[1], 1)]
    assert "4.00" in (tmp_path / "page.md").read_text()
