"""How a number of tokens is spent: rows per step, passes, learning rate; on the command line too."""

from __future__ import annotations

import json
import logging
import math
import re
from pathlib import Path

import pytest
from safetensors.torch import load_file
from transformers import LlamaConfig
from typer.testing import CliRunner

from hf_posenc.cli import app
from hf_posenc.errors import PosEncError
from hf_posenc.training import budget_arguments, default_learning_rate, format_recovery
from hf_posenc.training.budget import warmup_steps
from hf_posenc.training.objectives import Objective
from hf_posenc.training.stock_start import suggest_options
from tests.support import word_level_tokenizer as word_level


@pytest.mark.parametrize(
    ("tokens", "devices", "rows", "passes"),
    [(8_000, 1, 1, 10), (30_000, 1, 1, 10), (100_000, 1, 1, 3), (1_000_000, 1, 13, 1), (1_000_000, 4, 3, 1)],
)
def test_small_budgets_take_small_steps_and_several_passes(tokens: int, devices: int, rows: int, passes: int) -> None:
    expected = {"per_device_train_batch_size": rows, "num_train_epochs": passes}
    assert budget_arguments(tokens, 256, num_devices=devices) == expected
    assert budget_arguments(tokens, 256, passes=2, num_devices=devices)["num_train_epochs"] == 2


def test_impossible_budgets_are_refused() -> None:
    with pytest.raises(PosEncError, match="less than one row of 256"):
        budget_arguments(500, 256, num_devices=2)
    with pytest.raises(PosEncError, match="--passes must be at least 1"):
        budget_arguments(5000, 256, passes=0)


def test_learning_rate_follows_width_and_batch() -> None:
    narrow, wide = LlamaConfig(hidden_size=64), LlamaConfig(hidden_size=256)
    assert default_learning_rate(narrow) == 2 * default_learning_rate(wide) == 1e-3
    assert default_learning_rate(narrow, 1024) == pytest.approx(2e-3)


def test_warmup_is_long_enough_in_short_runs() -> None:
    assert [warmup_steps(0.05, steps) for steps in (2, 6, 30, 100, 1000)] == [0, 2, 10, 10, 50]


def run(*words: object) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["train", *map(str, words)])
    return done.exit_code, done.output


@pytest.fixture
def options(stock: dict[str, Path], tmp_path: Path) -> list[object]:
    data = tmp_path / "text.txt"
    data.write_text(word_level.text(600))
    model = ["--model", stock["llama"], "--scheme", "t5", "--train-length", 16]
    return [*model, "--data", data, "--eval-data", data, "--output-dir", tmp_path / "out", "--report-to", "none"]


def test_tokens_limit_the_rows_and_are_reported(options: list[object], tmp_path: Path) -> None:
    code, output = run(*options, "--tokens", 100, "--passes", 2, "--cache-teacher")
    assert code == 0, output
    state = json.loads((tmp_path / "out" / "run.json").read_text())
    assert state["dataset"]["num_rows"] == 6
    assert state["arguments"]["rows_per_step"] == 1
    assert state["arguments"]["num_train_epochs"] == 2
    assert state["steps"] == 12
    recovery = json.loads((tmp_path / "out" / "recovery.json").read_text())
    assert (recovery["tokens_unique"], recovery["tokens_seen"]) == (96, 192)
    for stage in ("original", "swapped", "started"):
        assert recovery[stage]["eval_perplexity"] == pytest.approx(math.exp(recovery[stage]["eval_loss"]))
        assert recovery[stage]["self_generated_perplexity"] != recovery[stage]["eval_perplexity"]
    assert load_file(tmp_path / "out" / "self_generated_eval.safetensors")["input_ids"].shape == (8, 16)
    assert re.search(r"after training +[\d.]+ +[\d.]+\n", output)
    assert "after the warm start" in output
    assert "96 unique, 192 seen" in output
    assert "AutoModelForCausalLM.from_pretrained" in output
    assert not (tmp_path / "out" / "teacher_cache").exists()


@pytest.mark.slow
def test_own_text_can_be_left_out_or_measured_alone(options: list[object], tmp_path: Path) -> None:
    code, output = run(*options, "--tokens", 32, "--passes", 1, "--self-eval-rows", 0)
    assert code == 0, output
    assert "own text" not in output
    at = options.index("--eval-data")
    del options[at : at + 2]
    code, output = run(*options, "--tokens", 32, "--passes", 1, "--self-eval-rows", 2, "--restart")
    assert code == 0, output
    recovery = json.loads((tmp_path / "out" / "recovery.json").read_text())
    assert "eval_perplexity" not in recovery
    assert recovery["original"]["self_generated_perplexity"] < recovery["swapped"]["self_generated_perplexity"]


def test_the_closing_table_has_a_column_for_each_kind_of_text() -> None:
    stages = {"original": {"eval_perplexity": 10.0, "self_generated_perplexity": 4.0}, "swapped": {}}
    trained = {"eval_perplexity": 12.0, "self_generated_perplexity": 4.5}
    lines = format_recovery({**trained, **stages}, Path("out"), Objective.CAUSAL).splitlines()
    assert [line.split() for line in lines[:3]] == [
        ["Perplexity", "held-out", "text", "own", "text"],
        ["original", "10", "4"],
        ["after", "training", "12", "4.5"],
    ]
    assert "flatters" in lines[3]
    only_real = format_recovery({"eval_accuracy": 0.5}, Path("out"), Objective.CLASSIFICATION)
    assert "own text" not in only_real.lower()


def test_contradicting_lengths_are_refused(options: list[object]) -> None:
    for words, message in (
        (["--tokens", 100, "--max-steps", 3], "--tokens and --max-steps"),
        (["--passes", 2], "--passes needs --tokens"),
        (["--tokens", 100, "--cache-teacher", "--no-teacher"], "--cache-teacher needs a teacher"),
    ):
        code, output = run(*options, *words)
        assert code == 2
        assert message in " ".join(output.split())


def test_better_options_are_suggested(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    monkeypatch.setattr(logging.getLogger("hf_posenc"), "propagate", True)
    for scheme, expected in (
        ("t5", '{"type": "t5", "shared": false}'),
        ({"type": "alibi", "learned": True}, '{"type": "alibi", "learned": "per_layer"}'),
        ({"type": "t5", "shared": False}, None),
        (["learned", "kerple"], None),
    ):
        caplog.clear()
        suggest_options(scheme)
        assert (expected in caplog.text) if expected else not caplog.text
