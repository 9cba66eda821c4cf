"""`train` ends with exit code 2 and one sentence for data, places, values and run.json that it cannot use."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from transformers import Trainer
from typer.testing import CliRunner

from hf_posenc.cli import app
from tests.cli.test_bad_places import BAD_DATA
from tests.support import word_level_tokenizer as word_level
from tests.support.hostile_yaml import HOSTILE_YAML

pytest.importorskip("datasets", reason="the extra `train` is not installed")
BAD_DATA = {**BAD_DATA, "unknown ids.jsonl": '{"input_ids": [5, 6, 5000000, 7, 8, 9, 10, 11, 12]}\n'}
BAD_VALUES = {
    "gradient-accumulation-steps": "0",
    "per-device-train-batch-size": "0",
    "per-device-eval-batch-size": "-1",
    "num-train-epochs": "0",
    "learning-rate": "nan",
    "logging-steps": "0",
    "save-steps": "0",
    "seed": "-1",
    "adam-beta1": "2",
    "adam-epsilon": "-1",
    "optim-args": "x",
    "optim": "adamw_bnb_8bit",
    "warmup-steps": "nan",
    "lr-scheduler-kwargs": '{"x":1}',
    "dataloader-num-workers": "-1",
    "train-length": "9" * 5000,
    "target-length": "9" * 30,
    "lora-rank": "9" * 20,
    "self-eval-rows": "9" * 20,
    "fsdp": "full_shard",
    "torch-compile-backend": "nope",
    "neftune-noise-alpha": "nan",
    "max-grad-norm": "nan",
    "label-smoothing-factor": "5",
    "save-strategy": "best",
    "metric-for-best-model": "nope",
    "eval-delay": "nan",
}
"""One value for each option. tests/training/test_argument_checks.py has more of them."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("bad")
    (directory / "text.txt").write_text(word_level.text(200))
    return word_level.saved("gpt2", directory / "stock", n_layer=1)


def train(checkpoint: Path, out: Path, *options: object, data: Path | None = None, code: int = 2) -> str:
    line = ["train", "--model", checkpoint, "--data", data or checkpoint.parent / "text.txt", "--scheme", "alibi"]
    line += [
        "--recipe",
        "naive",
        "--train-length",
        8,
        "--use-cpu",
        "--report-to",
        "none",
        "--output-dir",
        out,
        *options,
    ]
    done = CliRunner().invoke(app, list(map(str, line)))
    assert done.exit_code == code, (done.output, done.exception)
    if code:
        assert "error: " in done.stderr
        assert len(done.stderr) < 2000
    return done.stderr


FAST = ("empty.jsonl", "cut.jsonl", "numbers.jsonl", "mixed.jsonl", "unknown ids.jsonl")
DATA_CASES = [
    pytest.param(name, option, marks=[] if name in FAST and option == "--packing" else [pytest.mark.slow])
    for name in BAD_DATA
    for option in ("--packing", "--no-packing", "--streaming")
    if (name, option) != ("columns.jsonl", "--no-packing")  # one short row, which is enough without packing
]


@pytest.mark.parametrize(("name", "option"), DATA_CASES)
def test_bad_data(name: str, option: str, checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / name).write_text(BAD_DATA[name])
    train(checkpoint, tmp_path / "out", "--max-steps", 1, option, data=tmp_path / name)
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_stream_that_breaks_later(checkpoint: Path, tmp_path: Path) -> None:
    rows = [json.dumps({"text": word_level.text(50)})] * 200
    (tmp_path / "late.jsonl").write_text("\n".join([*rows, '{"text": 5}', '{"text": "w5']))
    train(checkpoint, tmp_path / "out", "--max-steps", 1000, "--streaming", data=tmp_path / "late.jsonl")


def test_a_description_next_to_the_data_is_not_data(checkpoint: Path, tmp_path: Path) -> None:
    from datasets import Dataset

    Dataset.from_dict({"text": [word_level.text(100)] * 2}).to_parquet(tmp_path / "data" / "train.parquet")
    (tmp_path / "data" / "README.md").write_text("# About this dataset")
    train(checkpoint, tmp_path / "out", "--max-steps", 1, data=tmp_path / "data", code=0)


@pytest.mark.parametrize("option", BAD_VALUES)
def test_bad_values(option: str, checkpoint: Path, tmp_path: Path) -> None:
    message = train(checkpoint, tmp_path / "out", f"--{option}", BAD_VALUES[option])
    assert f"--{option}" in message.replace("_", "-")  # transformers refuses some of them itself
    assert not (tmp_path / "out").exists()


def test_a_metric_that_is_not_measured(checkpoint: Path, tmp_path: Path) -> None:
    evaluation = ["--eval-data", checkpoint.parent / "text.txt", "--eval-strategy", "steps", "--eval-steps", 1]
    options = [*evaluation, "--max-steps", 1, "--metric-for-best-model"]
    assert "one of loss, perplexity" in train(checkpoint, tmp_path / "out", *options, "nope")
    assert not (tmp_path / "out").exists()
    train(checkpoint, tmp_path / "out", *options, "perplexity", "--greater-is-better", "false", code=0)


@pytest.mark.parametrize("seed", [-1, 2**70])
def test_seeds_of_conversions(seed: int, checkpoint: Path, tmp_path: Path) -> None:
    line = ["convert", checkpoint, "--scheme", "t5", "--out", tmp_path / "out", "--seed", seed]
    done = CliRunner().invoke(app, list(map(str, line)))
    assert done.exit_code == 2, (done.output, done.exception)
    assert "--seed" in done.stderr


@pytest.mark.parametrize(
    "method", ["get_optimizer_cls_and_kwargs", "create_scheduler", "create_accelerator_and_postprocess"]
)
def test_what_only_the_trainer_refuses(
    method: str, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as target modules that the model does not have."""

    def refuse(*_: object, **__: object) -> None:
        raise ValueError("No target modules found")

    monkeypatch.setattr(Trainer, method, refuse)
    options = ["--optim", "galore_adamw", "--optim-target-modules", "nope"] if "optim" in method else []
    message = train(checkpoint, tmp_path / "out", "--max-steps", 1, *options)
    assert "cannot be used: No target modules found" in message


def test_arguments_that_transformers_refuses(checkpoint: Path, tmp_path: Path) -> None:
    message = train(checkpoint, tmp_path / "out", "--lr-scheduler-kwargs", "{")
    assert "do not fit together" in message


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name == "many values" else []) for name in HOSTILE_YAML]
)
def test_hostile_config_files(name: str, checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(HOSTILE_YAML[name])
    train(checkpoint, tmp_path / "out", "--config", tmp_path / "run.yaml")


@pytest.mark.parametrize("place", ["FILE", "FILE/x", "/proc/x", "/dev/full/x", "LONG"])
def test_bad_places(place: str, checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    out = place.replace("FILE", str(tmp_path / "file")).replace("LONG", str(tmp_path / ("x" * 300)))
    train(checkpoint, Path(out), "--max-steps", 1)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_read_only_place(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mkdir = Path.mkdir

    def read_only(path: Path, *args: object, **options: object) -> None:
        if path == tmp_path / "out":
            raise OSError(30, "Read-only file system", str(path))
        mkdir(path, *args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(Path, "mkdir", read_only)
    assert "Read-only file system" in train(checkpoint, tmp_path / "out", "--max-steps", 1)


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write everywhere")
def test_a_directory_without_permission(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir(mode=0o500)
    assert "Permission denied" in train(checkpoint, tmp_path / "out", "--max-steps", 1)


DAMAGED = ["", "{", "[]", "\x00", '"x"', "[" * 5000, '{"dataset": []}', '{"dataset": {}, "request": 5}']
DAMAGED += ['{"measured": {"trained": 5}}', '{"measured": []}', '{"arguments": "x", "dataset": {}}']


@pytest.mark.parametrize("text", DAMAGED, ids=range(len(DAMAGED)))
def test_damaged_run_state(text: str, checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "run.json").write_text(text)
    assert "--restart" in train(checkpoint, tmp_path / "out", "--max-steps", 1)
    assert (tmp_path / "out" / "run.json").read_text() == text


def test_a_damaged_run_can_be_restarted(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "run.json").write_text("{")
    train(checkpoint, tmp_path / "out", "--max-steps", 1, "--restart", code=0)
    assert json.loads((tmp_path / "out" / "run.json").read_text())["finished"]
