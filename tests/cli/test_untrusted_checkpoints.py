"""Commands that load a model refuse what `convert` refuses: pickles, code, deep nesting, sizes that do not fit."""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import hf_posenc
from hf_posenc.cli import app
from tests.support import word_level_tokenizer as word_level
from tests.support.evidence import count_cases
from tests.support.sampling import some

DEEP = "[" * 900 + "]" * 900


class Trap:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    (tmp_path / "text.txt").write_text(word_level.text(200))
    return word_level.saved("gpt2", tmp_path / "stock")


def edit_json(path: Path, **changes: Any) -> None:
    values = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**values, **changes}))


def use_pickle(directory: Path, created: Path) -> None:
    (directory / "model.safetensors").unlink()
    (directory / "pytorch_model.bin").write_bytes(pickle.dumps(Trap(created)))


def name_code(directory: Path, created: Path, file: str, **fields: Any) -> None:
    (directory / "trap.py").write_text(f"open({str(created)!r}, 'w').close()\nclass Trap: pass\n")
    edit_json(directory / file, **fields)


def choose_weights(directory: Path, created: Path, name: str) -> None:
    if name.endswith(".bin"):
        (directory / name).write_bytes(pickle.dumps(Trap(created)))
    else:
        shutil.copyfile(directory / "model.safetensors", directory / name)
    edit_json(directory / "config.json", transformers_weights=name)


def nest(directory: Path, file: str) -> None:
    path = directory / file
    text = path.read_text().rstrip()[:-1] if path.exists() else '{"a": 1'
    path.write_text(f'{text}, "deep": {DEEP}}}')


MODEL_CODE = {"model_type": "stranger", "auto_map": dict.fromkeys(["AutoConfig", "AutoModelForCausalLM"], "trap.Trap")}
TOKENIZER_CODE = {"auto_map": {"AutoTokenizer": ["trap.Trap", "trap.Trap"]}, "tokenizer_class": "Trap"}
HOSTILE: dict[str, Callable[[Path, Path], None]] = {
    "pickle": use_pickle,
    "model code": lambda directory, created: name_code(directory, created, "config.json", **MODEL_CODE),
    "kernel": lambda directory, _: edit_json(directory / "config.json", attn_implementation="somebody/kernel"),
    "other weights": lambda directory, created: choose_weights(directory, created, "other.safetensors"),
    "other weights, a pickle": lambda directory, created: choose_weights(directory, created, "adapter_model.bin"),
    "adapter": lambda directory, _: edit_json(directory / "adapter_config.json", base_model_name_or_path="somebody/x"),
    "deep config": lambda directory, _: nest(directory, "config.json"),
    "deep tokenizer config": lambda directory, _: nest(directory, "tokenizer_config.json"),
    "deep special tokens": lambda directory, _: nest(directory, "special_tokens_map.json"),
    "deep tokenizer": lambda directory, _: nest(directory, "tokenizer.json"),
    "damaged tokenizer": lambda directory, _: (directory / "tokenizer.json").write_text("{") and None,
    "more layers than weights": lambda directory, _: edit_json(directory / "config.json", n_layer=1000),
    "wider than its weights": lambda directory, _: edit_json(directory / "config.json", n_embd=4096),
}


@some("name", HOSTILE, fast=["pickle", "model code", "other weights", "deep config"])
def test_hostile_checkpoints_are_refused(name: str, checkpoint: Path, tmp_path: Path) -> None:
    created, text = tmp_path / "created", str(tmp_path / "text.txt")
    HOSTILE[name](checkpoint, created)
    evaluation = ["--data", text, "--lengths", "12", "--no-progress"]
    good = word_level.saved("gpt2", tmp_path / "good")
    training = ["--scheme", "alibi", "--data", text, "--train-length", "8", "--max-steps", "1", "--use-cpu"]
    for command in (
        ["train", "--model", str(checkpoint), *training, "--output-dir", str(tmp_path / "out"), "--report-to", "none"],
        ["eval", str(checkpoint), *evaluation],
        ["eval", str(good), *evaluation, "--metrics", "similarity", "--reference", str(checkpoint)],
        ["plot", "attention-by-distance", "--model", str(checkpoint), "--data", text, "--json"],
        ["plot", "token-clusters", "--model", str(checkpoint), "--length", "12", "--json"],
    ):
        done = CliRunner().invoke(app, command, input="y\n" * 9)
        assert done.exit_code == 2, (command, done.output, done.exception)
        assert "error: " in done.stderr, command
        assert not created.exists(), command
    count_cases("hostile checkpoints", 1)


@pytest.mark.parametrize("kind", ["stock", "variant"])
def test_other_files_next_to_the_weights_are_not_run(kind: str, checkpoint: Path, tmp_path: Path) -> None:
    """With safetensors and a stock class, pickles and code are ignored; refused if nothing else will do."""
    created = tmp_path / "created"
    if kind == "variant":
        hf_posenc.convert_checkpoint(checkpoint, "alibi", tmp_path / "variant")
        checkpoint = tmp_path / "variant"
    name_code(checkpoint, created, "tokenizer_config.json", **TOKENIZER_CODE)
    (checkpoint / "pytorch_model.bin").write_bytes(pickle.dumps(Trap(created)))
    name_code(checkpoint, created, "config.json", auto_map={"AutoModelForCausalLM": "trap.Trap"})
    text = str(tmp_path / "text.txt")
    training = ["--data", text, "--train-length", "8", "--max-steps", "1", "--use-cpu", "--recipe", "naive"]
    training += ["--scheme", "alibi"] if kind == "stock" else []
    for command in (
        ["train", "--model", str(checkpoint), *training, "--output-dir", str(tmp_path / "out"), "--report-to", "none"],
        ["eval", str(checkpoint), "--data", text, "--lengths", "12", "--no-progress"],
        ["plot", "attention-by-distance", "--model", str(checkpoint), "--data", text, "--json"],
        ["plot", "token-clusters", "--model", str(checkpoint), "--length", "12", "--json"],
    ):
        done = CliRunner().invoke(app, command, input="y\n" * 9)
        assert not created.exists(), command
        assert done.exit_code in (0, 2), (command, done.output, done.exception)
        assert "trust_remote_code" not in done.output
    count_cases("hostile checkpoints", 1)


def test_tokens_need_no_tokenizer(checkpoint: Path, tmp_path: Path) -> None:
    for path in checkpoint.glob("tokenizer*"):
        path.unlink()
    (tmp_path / "ids.jsonl").write_text(json.dumps({"input_ids": list(range(5, 60)) * 2}) + "\n")
    options = ["--lengths", "12", "--no-progress", "--json"]
    done = CliRunner().invoke(app, ["eval", str(checkpoint), "--data", str(tmp_path / "ids.jsonl"), *options])
    assert done.exit_code == 0, (done.output, done.exception)
    done = CliRunner().invoke(app, ["eval", str(checkpoint), "--data", str(tmp_path / "text.txt"), *options])
    assert done.exit_code == 2, (done.output, done.exception)
