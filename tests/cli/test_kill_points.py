"""Commands that are killed at any call that changes something finish with the same bytes when they are run again."""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import hf_posenc
from tests.support import word_level_tokenizer as word_level
from tests.support.evidence import count_cases
from tests.support.hub_client import environment
from tests.support.hub_fixtures import OWNER
from tests.support.hub_server import Hub
from tests.support.kill_points import Commands, Outcome, run_command

Snapshot = dict[str, Any]
COMPLETE = ("is not empty", "holds a finished run")
"""How commands refuse to repeat what was completed before the kill."""
TIMES = ("train_seconds", "train_runtime", "train_samples_per_second", "train_steps_per_second")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A stock checkpoint of several shards, with several chat templates."""
    directory = tmp_path_factory.mktemp("kill") / "source"
    tokenizer = word_level.tokenizer()
    tokenizer.chat_template = {"default": "{{ messages }}", "tools": "{{ tools }}"}
    word_level.saved("gpt2", directory, n_layer=1)
    tokenizer.save_pretrained(directory)
    assert (directory / "additional_chat_templates" / "tools.jinja").is_file()
    (directory.parent / "text.txt").write_text(word_level.text(300))
    return directory


def convert(source: Path, out: Path, *options: object) -> list[object]:
    return ["convert", source, "--scheme", "t5", "--out", out, *options]


def train(source: Path, out: Path) -> list[object]:
    line = ["train", "--model", source, "--data", source.parent / "text.txt", "--scheme", "t5", "--train-length", 8]
    line += ["--max-steps", 2, "--save-steps", 1, "--cache-teacher", "--per-device-train-batch-size", 2, "--use-cpu"]
    return [*line, "--disable-tqdm", "true", "--report-to", "none", "--fit-ratio", 0, "--output-dir", out]


def evaluate(source: Path, out: Path) -> list[object]:
    line = ["eval", source, "--data", source.parent / "text.txt", "--lengths", "8,12", "--metrics", "perplexity,order"]
    return [*line, "--no-progress", "--results", out / "eval.json", "--csv", out / "eval.csv"]


def snapshot(directory: Path) -> Snapshot:
    """The content of all files, without times. Lock files that a killed process has left lock nothing."""
    files: Snapshot = {}
    for path in directory.rglob("*"):
        if path.is_file() and path.suffix != ".lock":
            content: Any = path.read_bytes()
            if path.name in ("run.json", "recovery.json"):
                content = {name: value for name, value in json.loads(content).items() if name not in TIMES}
            files[str(path.relative_to(directory))] = content
    return files


def check_kill(
    line: list[object],
    watched: Path,
    kill_at: int | str,
    expected: Snapshot,
    run: Callable[..., Outcome] = run_command,
    read: Callable[[], Snapshot] | None = None,
) -> None:
    """Kill a command, run it again, and compare what it leaves."""
    killed = run(line, watched, kill_at)
    assert killed.code == -signal.SIGKILL, (kill_at, killed.code, killed.output[-3000:])
    again = run(line, watched)
    is_complete = again.code == 2 and any(text in again.output for text in COMPLETE)
    assert again.code == 0 or is_complete, (kill_at, killed.points[-1], again.output[-3000:])
    left = snapshot(watched) if read is None else read()
    different = [name for name in {*left, *expected} if left.get(name) != expected.get(name)]
    assert not different, (kill_at, killed.points[-1], different)


def test_one_kill_per_command(source: Path, tmp_path: Path) -> None:
    """Where it matters most: just before a file gets its final name."""
    for name, line in (
        ("convert", convert(source, tmp_path / "convert" / "a" / "out")),
        ("eval", evaluate(source, tmp_path / "eval" / "a")),
    ):
        watched = tmp_path / name
        done = run_command(line, watched)
        assert done.code == 0, done.output
        last_rename = max(number for number, point in enumerate(done.points, 1) if point.startswith("os.rename"))
        expected = snapshot(watched)
        shutil.rmtree(watched)
        check_kill(line, watched, last_rename, expected)


@pytest.mark.slow
def test_several_chat_templates_are_placed_again(source: Path, tmp_path: Path) -> None:
    """They are in a directory, which cannot be renamed onto the one that the killed run has placed."""
    line = train(source, tmp_path / "train" / "out")
    killed = run_command(line, tmp_path / "train", "os.rename config.json")
    assert killed.code == -signal.SIGKILL, killed.output
    assert (tmp_path / "train" / "out" / "additional_chat_templates" / "tools.jinja").is_file()
    assert not (tmp_path / "train" / "out" / "config.json").exists()
    again = run_command(line, tmp_path / "train")
    assert again.code == 0, again.output
    state = json.loads((tmp_path / "train" / "out" / "run.json").read_text())
    assert state["finished"]
    assert state["steps"] == 2, "no step is trained again"
    hf_posenc.inspect_checkpoint(tmp_path / "train" / "out")


@pytest.mark.slow
def test_a_directory_that_is_renamed_is_not_placed_again(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control of the test above: moving what the staging directory contains, instead of its files."""

    def rename_entries(staging: Path, target: Path, last: str) -> None:
        for path in sorted(staging.iterdir(), key=lambda path: path.name == last):
            path.replace(target / path.name)

    monkeypatch.setattr("hf_posenc.training.run.move_files", rename_entries)
    line = train(source, tmp_path / "train" / "out")
    assert run_command(line, tmp_path / "train", "os.rename config.json").code == -signal.SIGKILL
    again = run_command(line, tmp_path / "train")
    assert again.code
    assert "Directory not empty" in again.output


@pytest.mark.slow
@pytest.mark.parametrize("case", ["convert", "replace", "eval", "train"])
def test_every_kill_point(case: str, source: Path, tmp_path: Path) -> None:
    start, watched = tmp_path / "start", tmp_path / "watched"
    start.mkdir()
    lines = {
        "convert": convert(source, watched / "new" / "out"),
        "replace": convert(source, watched / "out", "--force"),
        "eval": evaluate(source, watched / "new"),
        "train": train(source, watched / "out"),
    }
    line = lines[case]
    if case == "replace":
        hf_posenc.convert_checkpoint(source, "alibi", start / "out")
    elif case == "train":  # the last phase begins after the last checkpoint
        points = run_command(line, watched).points
        shutil.rmtree(watched)
        last_checkpoint = max(number for number, name in enumerate(points, 1) if name == "os.rename checkpoint-2")
        run_command(line, watched, last_checkpoint + 1)
        assert (watched / "out" / "checkpoint-2").is_dir()
        shutil.copytree(watched, start, dirs_exist_ok=True)
        shutil.rmtree(watched)
    shutil.copytree(start, watched)
    done = run_command(line, watched)
    assert done.code == 0, done.output
    expected = snapshot(watched)
    for kill_at in range(1, len(done.points) + 1):
        shutil.rmtree(watched)
        shutil.copytree(start, watched)
        check_kill(line, watched, kill_at, expected)
    count_cases("kill points", len(done.points))


@pytest.mark.slow
def test_every_kill_point_of_a_push(source: Path, hub: Hub, tmp_path: Path) -> None:
    start, watched = tmp_path / "start", tmp_path / "watched"
    hf_posenc.convert_checkpoint(source, "alibi", start / "variant")
    with Commands(environment(hub.url, tmp_path / "home", OWNER)) as commands:
        line: list[object] = ["push", watched / "variant", "me/variant"]
        shutil.copytree(start, watched)
        done = commands.run(line, watched)
        assert done.code == 0, done.output
        expected = {**hub.files("me/variant"), **snapshot(watched)}
        for kill_at in range(1, len(done.points) + 1):
            shutil.rmtree(watched)
            shutil.copytree(start, watched)
            hub.repos.clear()
            hub.large.clear()
            read = lambda: {**hub.files("me/variant"), **snapshot(watched)}  # noqa: E731
            check_kill(line, watched, kill_at, expected, commands.run, read)
    count_cases("kill points", len(done.points))
