"""Data that cannot be read and places that cannot be written end a command with exit code 2 and one sentence."""

from __future__ import annotations

import contextlib
import json
import signal
from pathlib import Path

import pytest
from typer.testing import CliRunner

import hf_posenc
from hf_posenc.cli import app
from hf_posenc.hub import push
from tests.support import word_level_tokenizer as word_level
from tests.support.sampling import combinations, some

with contextlib.suppress(ImportError):
    import datasets  # noqa: F401 (it logs to the stderr that it finds now, which must not be that of a CliRunner)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return word_level.saved("gpt2", tmp_path / "stock")


def check_refused(*arguments: object) -> str:
    done = CliRunner().invoke(app, list(map(str, arguments)))
    assert done.exit_code == 2, (done.output, done.exception)
    assert "error: " in done.stderr
    assert len(done.stderr) < 2000
    return done.stderr


BAD_DATA = {
    "empty.jsonl": "",
    "blank.jsonl": "\n\n",
    "cut.jsonl": '{"text": "w5 w6"}\n{"text": "w5',
    "array.jsonl": "[1, 2]\n",
    "numbers.jsonl": '{"text": 5}\n',
    "null.jsonl": '{"text": null}\n',
    "mixed.jsonl": '{"text": "w5 w6"}\n{"text": ["w5"]}\n{"other": 1}\n',
    "columns.jsonl": '{"text": "w5"}\n{"other": "w6"}\n',
    "nested ids.jsonl": '{"input_ids": [[5, 6]]}\n',
    "negative ids.jsonl": '{"input_ids": [5, -6]}\n',
    "huge ids.jsonl": f'{{"input_ids": [5, {10**30}]}}\n',
    "empty.txt": "",
    "empty.csv": "",
    "empty.parquet": "",
    "damaged.parquet": "PAR1 not really",
}


@pytest.mark.parametrize("name", BAD_DATA)
def test_bad_data(name: str, checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / name).write_text(BAD_DATA[name])
    check_refused("eval", checkpoint, "--data", tmp_path / name, "--lengths", "12", "--no-progress")


def test_a_description_next_to_the_data_is_not_data(checkpoint: Path, tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets", reason="the extra `train` is not installed")
    data = tmp_path / "data"
    datasets.Dataset.from_dict({"text": [word_level.text(100)] * 2}).to_parquet(data / "train.parquet")
    (data / "README.md").write_text("# About this dataset")
    (data / "directory.txt").mkdir()
    done = CliRunner().invoke(app, ["eval", str(checkpoint), "--data", str(data), "--lengths", "12", "--no-progress"])
    assert done.exit_code == 0, (done.output, done.exception)


@some("place", ["FILE/x", "/proc/x", "/dev/full/x", "LONG"], fast=["FILE/x", "LONG"])
def test_bad_places(place: str, checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "text.txt").write_text(word_level.text(200))
    out = Path(place.replace("FILE", str(tmp_path / "file")).replace("LONG", str(tmp_path / ("x" * 300))))
    evaluation = ["eval", checkpoint, "--data", tmp_path / "text.txt", "--lengths", "12", "--no-progress"]
    for option in ("--csv", "--results", "--plots"):
        check_refused(*evaluation, option, out)
    check_refused("convert", checkpoint, "--scheme", "rope", "--out", out)
    check_refused("plot", "rotary-decay", "--scheme", "rope", "--length", "9", "--out", out.with_suffix(".png"))
    check_refused("inspect", out)
    check_refused("push", out, "me/variant")


def test_a_full_disk_leaves_no_file(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "text.txt").write_text(word_level.text(200))
    (tmp_path / "old.csv").write_text("old")
    write_text, files = Path.write_text, sorted(path.name for path in tmp_path.iterdir())

    def full(path: Path, text: str, *args: object, **options: object) -> int:
        write_text(path, "")
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(Path, "write_text", full)
    evaluation = ["eval", checkpoint, "--data", tmp_path / "text.txt", "--lengths", "12", "--no-progress"]
    for option, name in (("--csv", "new.csv"), ("--csv", "old.csv"), ("--results", "new.json")):
        assert "No space left" in check_refused(*evaluation, option, tmp_path / name)
    assert sorted(path.name for path in tmp_path.iterdir()) == files
    assert (tmp_path / "old.csv").read_text() == "old"


@pytest.mark.parametrize("suffix", [".png", ".svg", ".pdf"])
def test_a_full_disk_leaves_the_previous_figure(
    suffix: str, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    resource = pytest.importorskip("resource", reason="not on Windows")
    pytest.importorskip("matplotlib", reason="the extra `plots` is not installed")
    (tmp_path / "text.txt").write_text(word_level.text(200))
    figure = tmp_path / f"old{suffix}"
    command = ["plot", "bias-by-distance", "--scheme", "alibi", "--out"]
    done = CliRunner().invoke(app, [*command, str(figure)])
    assert done.exit_code == 0, (done.output, done.exception)
    before, files = figure.read_bytes(), sorted(path.name for path in tmp_path.iterdir())
    evaluation = ["eval", checkpoint, "--data", tmp_path / "text.txt", "--lengths", "12,16", "--no-progress"]
    limits, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2048, limits[1]))  # every figure is larger
        check_refused(*command, figure)
        check_refused(*command, tmp_path / f"new{suffix}")
        check_refused(*evaluation, "--plots", tmp_path / "plots")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert figure.read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir() if path.name != "plots") == files
    assert not list((tmp_path / "plots").glob("*"))


@combinations(
    text=["", "{", "[]", "\x00", '"x"', "[" * 5000],
    name=["config.json", "tokenizer_config.json", "generation_config.json", "run.json"],
)
def test_damaged_json(name: str, text: str, checkpoint: Path, tmp_path: Path) -> None:
    hf_posenc.convert_checkpoint(checkpoint, "alibi", tmp_path / "variant")
    for directory in (checkpoint, tmp_path / "variant"):
        (directory / name).write_text(text)
    commands = {
        "config.json": ["inspect", "convert", "push", "eval", "plot"],
        "run.json": ["inspect", "push"],
        "tokenizer_config.json": ["convert", "push", "eval"],
    }
    (tmp_path / "text.txt").write_text(word_level.text(200))
    arguments = {
        "inspect": [tmp_path / "variant"],
        "convert": [checkpoint, "--scheme", "rope", "--out", tmp_path / "out"],
        "push": [tmp_path / "variant", "me/variant"],
        "eval": [tmp_path / "variant", "--data", tmp_path / "text.txt", "--lengths", "12", "--no-progress"],
        "plot": ["bias-by-distance", "--model", tmp_path / "variant", "--json"],
    }
    for command in commands.get(name, ["convert", "push"]):
        check_refused(command, *arguments[command])


def test_a_directory_that_cannot_be_written_is_not_pushed(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hf_posenc.convert_checkpoint(checkpoint, "alibi", tmp_path / "variant")

    def read_only(*_: object) -> None:
        raise PermissionError(13, "Permission denied", "modeling_hf_posenc.py")

    monkeypatch.setattr(push, "write_remote_code_module", read_only)
    monkeypatch.setattr(push.HfApi, "create_repo", lambda *_, **__: type("Repo", (), {"repo_id": "me/variant"}))
    branch = type("Branch", (), {"download": lambda *_: None, "read_card": lambda *_: None, "private": True})
    monkeypatch.setattr(push.Branch, "open", lambda *_: branch())
    assert "Permission denied" in check_refused("push", tmp_path / "variant", "me/variant")
    assert json.loads((tmp_path / "variant" / "config.json").read_text())["model_type"] == "posenc_gpt2"
