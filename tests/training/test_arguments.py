"""`hf-posenc train`: options, config files, and what is refused before anything is trained."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForQuestionAnswering
from typer.testing import CliRunner

from hf_posenc.checkpoints import RUN_STATE_FILE
from hf_posenc.cli import app
from hf_posenc.errors import PosEncError, install_command
from hf_posenc.training import LossWeights, train
from hf_posenc.training.arguments import Stage
from hf_posenc.training.factories import RunBuilder
from hf_posenc.training.recipes import NAIVE, RECOMMENDED
from tests.support import tiny_models as tiny
from tests.support.training_runs import LENGTH, request, settings


def test_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["hf_posenc.cli.train"], "find_spec", lambda name: None)
    line = ["train", "--model", "gpt2", "--data", "self", "--train-length", "8", "--output-dir", "out"]
    result = CliRunner().invoke(app, line)
    assert result.exit_code == 2
    assert install_command("train") in " ".join(result.output.split())


def test_command_line(stock: dict[str, Path], text: Path, tmp_path: Path) -> None:
    config = tmp_path / "run.yaml"
    config.write_text(
        f"model: {stock['gpt2']}\ndata: {text}\nscheme: {{type: t5, num_buckets: 8}}\ntrain-length: {LENGTH}\n"
        "max_steps: 6\nper-device-train-batch-size: 2\nuse_cpu: true\nsave_steps: 3\n"
    )
    runner = CliRunner()
    out = str(tmp_path / "out")
    line = ["train", "--config", str(config), "--output-dir", out, "--max-steps", "3", "--hidden-loss-weight", "2"]
    result = runner.invoke(app, line)
    assert result.exit_code == 0, result.output
    state = json.loads((tmp_path / "out" / RUN_STATE_FILE).read_text())
    assert state["finished"]
    assert state["arguments"]["max_steps"] == 3, "the command line takes precedence"
    assert state["arguments"]["rows_per_step"] == 2
    assert state["request"]["scheme"] == {"type": "t5", "num_buckets": 8}
    assert state["request"]["recipe"]["loss_weights"]["hidden"] == 2
    again = runner.invoke(app, line)
    assert again.exit_code == 2
    assert "holds a finished run" in again.output
    as_json = runner.invoke(app, [*line, "--restart", "--json", "--eval-data", str(text)])
    summary = json.loads(as_json.stdout)
    assert (summary["directory"], summary["steps"], summary["position_scheme"]["num_buckets"]) == (out, 3, 8)
    assert summary["recovery"]["eval_perplexity"] > 1
    for wrong, message in (
        (["train", "--model", "m"], "--data"),
        ([*line, "--restart", "--trainable", "some"], "positions"),
        ([*line, "--restart", "--fit-ratio", "7"], "between 0 and 1"),
        ([*line, "--restart", "--lora-rank", "0"], "--lora-rank"),
        ([*line, "--restart", "--mlm-probability", "2"], "--mlm-probability"),
        ([*line, "--restart", "--hidden-loss-weight", "-1"], "hidden loss weight"),
        ([*line, "--restart", "--max-step", "1"], "Did you mean --max-steps?"),
        ([*line, "--restart", "--report-to", "nonsense"], "available: nonsense is not supported"),
        ([*line, "--recipe", "x"], "recipe 'x'"),
        ([*line, "--restart", "--scheme", "{"], "--scheme must be"),
        ([*line, "--restart", "--no-such-option", "1"], "no-such-option"),
    ):
        refused = runner.invoke(app, wrong)
        assert refused.exit_code == 2, refused.output
        assert message in refused.output
    assert json.loads((tmp_path / "out" / RUN_STATE_FILE).read_text())["finished"], "the earlier run is kept"


def test_config_file_is_read_like_the_command_line(stock: dict[str, Path], text: Path, tmp_path: Path) -> None:
    """YAML reads 1e-1 as a string, and a list as several values of one option."""
    config = tmp_path / "run.yaml"
    lines = {"model": stock["gpt2"], "data": text, "scheme": "alibi", "train_length": LENGTH, "max_steps": 2}
    lines |= {"fit-ratio": "1e-1", "learning_rate": "1e-3", "use_cpu": "true", "report_to": "[none]", "seed": "null"}

    def run_config(**changes: Any) -> Any:
        config.write_text("".join(f"{name}: {value}\n" for name, value in {**lines, **changes}.items()))
        return CliRunner().invoke(app, ["train", "--config", str(config), "--output-dir", str(tmp_path / "out")])

    for changes, message in (
        ({"teacher": "maybe"}, "Invalid value.*--teacher"),
        ({"lora_rank": 1.5}, "Invalid value.*--lora-rank"),
        ({"fit-ratio": "much"}, "Invalid value.*--fit-ratio"),
        ({"data": "[a, b]"}, "No data found"),
        ({"restart": "true"}, "only on the command line"),
    ):
        refused = run_config(**changes)
        assert refused.exit_code == 2, refused.output
        assert re.search(message, refused.output, re.S), refused.output
    assert not (tmp_path / "out").exists()
    result = run_config()
    assert result.exit_code == 0, result.output
    assert json.loads((tmp_path / "out" / RUN_STATE_FILE).read_text())["request"]["recipe"]["fit_ratio"] == 0.1


def test_text_requires_a_tokenizer(stock: dict[str, Path], text: Path, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    AutoModelForCausalLM.from_pretrained(stock["gpt2"]).save_pretrained(bare)
    with pytest.raises(PosEncError, match="Cannot load a tokenizer"):
        train(request(bare, text), settings(tmp_path / "out"))
    train(request(bare, "self", self_generated_rows=8), settings(tmp_path / "out", max_steps=1))


def test_unknown_head_is_refused(stock: dict[str, Path], text: Path, tmp_path: Path) -> None:
    AutoModelForQuestionAnswering.from_pretrained(stock["bert"]).save_pretrained(tmp_path / "answers")
    with pytest.raises(PosEncError, match="no training task"):
        train(request(tmp_path / "answers", text), settings(tmp_path / "out"))


def test_contradictions_are_refused(stock: dict[str, Path], text: Path, tmp_path: Path) -> None:
    longer = str(4 * tiny.TRAINED_LENGTH)
    with pytest.raises(PosEncError, match="longer than the"):
        train(request(stock["gpt2"], "self", train_length=longer), settings(tmp_path / "a"))
    with pytest.raises(PosEncError, match="--label-smoothing-factor"):
        train(request(stock["gpt2"], text), settings(tmp_path / "c", label_smoothing_factor=0.1))
    with pytest.raises(PosEncError, match="contradicts"):
        request(stock["gpt2"], text, teacher_model=str(stock["gpt2"]), recipe=NAIVE)


@pytest.mark.parametrize(
    ("sizes", "weights", "match"),
    [
        ({"vocab_size": 70}, LossWeights(), "vocab_size 70.*--kl-loss-weight 0"),
        ({"n_embd": 64}, LossWeights(), "hidden_size 64.*--hidden-loss-weight 0"),
        ({"n_layer": 2}, LossWeights(), "num_hidden_layers 2.*--hidden-loss-weight 0"),
        ({"n_embd": 64, "n_layer": 2}, LossWeights(hidden=0.0), None),
    ],
)
def test_teacher_of_another_size(
    sizes: dict[str, int], weights: LossWeights, match: str | None, stock: dict[str, Path], text: Path, tmp_path: Path
) -> None:
    tiny.model("gpt2", dtype=torch.float32, **sizes).save_pretrained(tmp_path / "teacher")
    recipe = dataclasses.replace(RECOMMENDED, loss_weights=weights)
    train_request = request(stock["gpt2"], text, teacher_model=str(tmp_path / "teacher"), recipe=recipe)
    expectation = pytest.raises(PosEncError, match=match) if match else contextlib.nullcontext()
    with expectation:
        train(train_request, settings(tmp_path / "out", max_steps=2))


def test_teachers_separate_packed_documents(stock: dict[str, Path], tmp_path: Path) -> None:
    """The stock model as the default teacher, and as one named by the request."""
    positions = torch.tensor([[*range(7), *range(9)]])
    logits = []
    for teacher_model in (None, str(stock["bert"])):
        train_request = request(stock["bert"], "text", teacher_model=teacher_model, packing=True)
        teacher = RunBuilder(train_request, settings(tmp_path), [Stage(16)]).teacher
        assert teacher is not None
        logits.append(teacher.forward({"input_ids": tiny.tokens(1, 16), "position_ids": positions}).logits_BNV)
    assert torch.equal(*logits)
