"""How a run is asked for: options, files of options, and what is refused before anything is trained."""

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

from hf_posenc.cli import app
from hf_posenc.training.objective import Objective
from hf_posenc.training.parts import teacher_of
from hf_posenc.training.recipe import NAIVE, RECOMMENDED, Recipe
from hf_posenc.training.request import NOTE
from hf_posenc.training.run import train
from hf_posenc.training.teacher import Weights
from tests.support import tiny_models as tiny
from tests.support.training_fixtures import LENGTH, request, settings


def test_without_its_extra_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["hf_posenc.cli.train"], "find_spec", lambda name: None)
    done = CliRunner().invoke(app, ["train", "--model", "gpt2"])
    assert done.exit_code == 2
    assert "accelerate and datasets, not installed here: pip install hf_posenc[train]" in done.output


def test_the_command_line(stock: dict[str, Path], text: Path, tmp_path: Path) -> None:
    config = tmp_path / "run.yaml"
    config.write_text(
        f"model: {stock['gpt2']}\ndata: {text}\nscheme: {{type: t5, num_buckets: 8}}\ntrain-length: {LENGTH}\n"
        "max_steps: 6\nper-device-train-batch-size: 2\nuse_cpu: true\nsave_steps: 3\n"
    )
    run = CliRunner()
    out = str(tmp_path / "out")
    line = ["train", "--config", str(config), "--output-dir", out, "--max-steps", "3", "--state-weight", "2"]
    done = run.invoke(app, line)
    assert done.exit_code == 0, done.output
    note = json.loads((tmp_path / "out" / NOTE).read_text())
    assert note["finished"]
    assert note["settings"]["max_steps"] == 3, "the command line has the last word"
    assert note["settings"]["rows_a_step"] == 2
    assert note["request"]["scheme"] == {"type": "t5", "num_buckets": 8}
    assert note["request"]["recipe"]["weights"]["states"] == 2
    again = run.invoke(app, line)
    assert again.exit_code == 2
    assert "holds a finished run" in again.output
    assert run.invoke(app, [*line, "--restart"]).exit_code == 0
    as_json = run.invoke(app, [*line, "--restart", "--json", "--eval-data", str(text)])
    told = json.loads(as_json.stdout)
    assert (told["directory"], told["steps"], told["position_scheme"]["num_buckets"]) == (out, 3, 8)
    assert told["recovery"]["eval_perplexity"] > 1
    for wrong, told in (
        (["train", "--model", "m"], "--data is missing"),
        ([*line, "--restart", "--train", "some"], "one of all, positions, lora"),
        ([*line, "--restart", "--fit-share", "7"], "from 0 to 1"),
        ([*line, "--restart", "--state-weight", "-1"], "the weight of states"),
        ([*line, "--restart", "--max-step", "1"], "Did you mean --max-steps?"),
        ([*line, "--restart", "--report-to", "clearml"], "pip install clearml"),
        ([*line, "--recipe", "x"], "no recipe 'x'"),
        ([*line, "--restart", "--scheme", "{"], "--scheme must be"),
        ([*line, "--restart", "--no-such-option", "1"], "no-such-option"),
    ):
        refused = run.invoke(app, wrong)
        assert refused.exit_code == 2, refused.output
        assert told in refused.output
    assert json.loads((tmp_path / "out" / NOTE).read_text())["finished"], "what is refused throws nothing away"


def test_a_file_of_options_is_read_as_the_command_line_is(stock: dict[str, Path], text: Path, tmp_path: Path) -> None:
    """YAML takes 1e-1 for words, and a list is several values of one option."""
    config = tmp_path / "run.yaml"
    lines = {"model": stock["gpt2"], "data": text, "scheme": "alibi", "train_length": LENGTH, "max_steps": 2}
    lines |= {"fit-share": "1e-1", "learning_rate": "1e-3", "use_cpu": "true", "report_to": "[none]", "seed": "null"}

    def asked(**changes: Any) -> Any:
        config.write_text("".join(f"{name}: {value}\n" for name, value in {**lines, **changes}.items()))
        return CliRunner().invoke(app, ["train", "--config", str(config), "--output-dir", str(tmp_path / "out")])

    for changes, told in (
        ({"teacher": "maybe"}, "'teacher' in --config.*must be true or false"),
        ({"lora_rank": 1.5}, "must be a whole number"),
        ({"fit-share": "much"}, "must be a number"),
        ({"data": "[a, b]"}, "must be one value"),
        ({"restart": "true"}, "for the command line only"),
    ):
        refused = asked(**changes)
        assert refused.exit_code == 2, refused.output
        assert re.search(told, refused.output), refused.output
    assert not (tmp_path / "out").exists()
    done = asked()
    assert done.exit_code == 0, done.output
    assert json.loads((tmp_path / "out" / NOTE).read_text())["request"]["recipe"]["fit"] == 0.1


def test_text_needs_a_tokenizer(stock: dict[str, Path], text: Path, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    AutoModelForCausalLM.from_pretrained(stock["gpt2"]).save_pretrained(bare)
    with pytest.raises(ValueError, match="has no tokenizer to read text with"):
        train(request(bare, text), settings(tmp_path / "out"))
    train(request(bare, "self", self_rows=8), settings(tmp_path / "out", max_steps=1))


def test_a_head_without_a_task_is_not_left_out(stock: dict[str, Path], text: Path, tmp_path: Path) -> None:
    AutoModelForQuestionAnswering.from_pretrained(stock["bert"]).save_pretrained(tmp_path / "answers")
    with pytest.raises(ValueError, match="a head that there is no task for"):
        train(request(tmp_path / "answers", text), settings(tmp_path / "out"))


def test_rows_that_there_is_nothing_to_learn_from(stock: dict[str, Path], text: Path, tmp_path: Path) -> None:
    longer = str(4 * tiny.TRAINED_LENGTH)
    with pytest.raises(ValueError, match="longer than the"):
        train(request(stock["gpt2"], "self", train_length=longer), settings(tmp_path / "a"))
    with pytest.raises(ValueError, match="longer than the"):
        train(request(stock["bert"], text, task="states", train_length=longer), settings(tmp_path / "b"))
    with pytest.raises(ValueError, match="smooths labels"):
        train(request(stock["gpt2"], text), settings(tmp_path / "c", label_smoothing_factor=0.1))
    with pytest.raises(ValueError, match="take one away"):
        train(request(stock["gpt2"], text, teacher=str(stock["gpt2"]), recipe=NAIVE), settings(tmp_path / "d"))


@pytest.mark.parametrize(
    ("sizes", "weights", "match"),
    [
        ({"vocab_size": 70}, Weights(), "70 tokens.*--prediction-weight 0"),
        ({"n_embd": 64}, Weights(), "64 features.*--state-weight 0"),
        ({"n_layer": 2}, Weights(), "2 layers.*--state-weight 0"),
        ({"n_embd": 64, "n_layer": 2}, Weights(states=0.0), None),
    ],
)
def test_a_teacher_of_another_size(
    sizes: dict[str, int], weights: Weights, match: str | None, stock: dict[str, Path], text: Path, tmp_path: Path
) -> None:
    tiny.model("gpt2", dtype=torch.float32, **sizes).save_pretrained(tmp_path / "teacher")
    recipe = dataclasses.replace(RECOMMENDED, weights=weights)
    wanted = request(stock["gpt2"], text, teacher=str(tmp_path / "teacher"), recipe=recipe)
    refused = pytest.raises(ValueError, match=match) if match else contextlib.nullcontext()
    with refused:
        train(wanted, settings(tmp_path / "out", max_steps=2))


def test_the_best_model_of_a_handover_is_not_asked_for(stock: dict[str, Path], text: Path, tmp_path: Path) -> None:
    wanted = request(stock["gpt2"], text, eval_data=str(text), recipe=Recipe(handover=0.5))
    best = {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 2}
    with pytest.raises(ValueError, match="leave it, or the handover, out"):
        train(wanted, settings(tmp_path / "out", **best))


def test_any_teacher_tells_packed_documents_apart(stock: dict[str, Path]) -> None:
    """The same model as the teacher of its own, and as another: an encoder sees no further than a document."""
    positions = torch.tensor([[*range(7), *range(9)]])
    found = []
    for teacher in (None, str(stock["bert"])):
        asked = request(stock["bert"], "text", teacher=teacher)
        lesson = teacher_of(asked, Objective.MASKED, packing=True)
        assert lesson is not None
        found.append(lesson.look_at({"input_ids": tiny.tokens(1, 16), "position_ids": positions}).logits_BNV)
    assert torch.equal(*found)
