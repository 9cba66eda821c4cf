"""Of two processes with one output, the second says which process holds it, and stops."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

import hf_posenc
from hf_posenc import PosEncError
from hf_posenc.checkpoints import lock_output, locks, write_text
from hf_posenc.cli import app
from tests.support import word_level_tokenizer as word_level

HOLDER = """
import fcntl, json, os, sys, time
handle = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT)
fcntl.flock(handle, fcntl.LOCK_EX)
os.write(handle, json.dumps({"pid": os.getpid(), "host": "elsewhere", "since": "noon"}).encode())
print("held", flush=True)
time.sleep(600)
"""
"""Another process, without the time that it takes to import the package."""


def hold(lock: Path) -> subprocess.Popen[str]:
    lock.parent.mkdir(parents=True, exist_ok=True)
    process = subprocess.Popen([sys.executable, "-c", HOLDER, str(lock)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def stop(process: subprocess.Popen[str]) -> None:
    if process.poll() is None:
        process.kill()
        process.communicate()


@pytest.fixture
def held(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that holds the directory `out`."""
    process = hold(tmp_path / ".out.lock")
    yield process
    stop(process)


def test_every_command_names_the_holder(held: subprocess.Popen[str], tmp_path: Path) -> None:
    stock, text, out = word_level.saved("gpt2", tmp_path / "stock"), tmp_path / "text.txt", tmp_path / "out"
    text.write_text(word_level.text(200))
    hf_posenc.convert_checkpoint(stock, "rope", tmp_path / "variant")
    shutil.copytree(tmp_path / "variant", out)
    before = sorted(path.name for path in tmp_path.rglob("*"))
    evaluation = ["eval", stock, "--data", text, "--lengths", "12", "--no-progress"]
    training = [
        "train",
        "--model",
        stock,
        "--data",
        text,
        "--scheme",
        "alibi",
        "--train-length",
        "8",
        "--max-steps",
        "1",
    ]
    for line in (
        ["convert", stock, "--scheme", "rope", "--out", out, "--force"],
        ["convert", stock, "--scheme", "learned", "--stock", "--out", out, "--force"],
        ["export", tmp_path / "variant", "--out", out, "--force"],
        [*training, "--use-cpu", "--report-to", "none", "--output-dir", out],
        ["push", out, "me/variant"],
        [*evaluation, "--plots", out],
    ):
        done = CliRunner().invoke(app, list(map(str, line)))
        assert done.exit_code == 2, (line, done.output, done.exception)
        assert f"in use by process {held.pid} on elsewhere since noon" in done.stderr
    for option in ("--results", "--csv"):
        process = hold(tmp_path / ".file.lock")
        done = CliRunner().invoke(app, list(map(str, [*evaluation, option, tmp_path / "file"])))
        stop(process)
        assert done.exit_code == 2, (option, done.output, done.exception)
        assert f"in use by process {process.pid}" in done.stderr
        (tmp_path / ".file.lock").unlink()
    assert sorted(path.name for path in tmp_path.rglob("*")) == before, "nothing was written or deleted"
    assert hf_posenc.inspect_checkpoint(out).position_scheme == "rope"


def test_a_killed_process_holds_nothing(held: subprocess.Popen[str], tmp_path: Path) -> None:
    with pytest.raises(PosEncError, match=f"process {held.pid}"), lock_output(tmp_path / "out"):
        pass
    stop(held)
    assert (tmp_path / ".out.lock").exists()
    with lock_output(tmp_path / "out"):
        assert str(os.getpid()) in (tmp_path / ".out.lock").read_text()
    assert not list(tmp_path.iterdir())


def test_one_process_locks_an_output_once(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "new" / "out")
    with lock_output(tmp_path / "new" / "out"):
        for same in (tmp_path / "new" / "out", tmp_path / "new" / "." / "out", tmp_path / "link"):
            with pytest.raises(PosEncError, match=f"process {os.getpid()}"), lock_output(same):
                pass
        with lock_output(tmp_path / "new" / "other"):
            pass
    assert not (tmp_path / "new").exists(), "empty directories that were made for the lock are removed"


def test_a_lock_that_was_released_while_it_was_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its file is gone: locking it would not keep a third process out."""
    lock, file = locks._lock, tmp_path / ".out.lock"
    calls: list[int] = []

    def released_first(handle: int, output: str | Path) -> None:
        calls.append(handle)
        if len(calls) == 1:
            file.unlink()
        lock(handle, output)

    monkeypatch.setattr(locks, "_lock", released_first)
    with lock_output(tmp_path / "out"):
        assert file.exists()
        assert len(calls) == 2


def test_leftovers_of_killed_processes_are_deleted(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    leftovers = [tmp_path / ".out.123.tmp", tmp_path / "out" / ".run.json.45.tmp"]
    others = [tmp_path / ".other.123.tmp", tmp_path / "out" / ".mine.tmp", tmp_path / "out" / "x.1.tmp"]
    for path in leftovers + others:
        path.write_text("half")
    with lock_output(tmp_path / "out"):
        assert [path for path in leftovers + others if path.exists()] == others


@pytest.mark.parametrize("place", ["file/out", "/proc/out", "x" * 300, "loop/out"])
def test_places_that_cannot_be_locked(place: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises(PosEncError, match="Cannot write"), lock_output(tmp_path / place):
        pass


def test_a_directory_that_nothing_can_be_written_next_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lock is inside."""
    (tmp_path / "out").mkdir()
    monkeypatch.setattr(os.path, "ismount", lambda path: Path(path) == tmp_path / "out")
    with lock_output(tmp_path / "out"):
        assert [path.name for path in tmp_path.iterdir()] == ["out"]
        with pytest.raises(PosEncError, match="in use"), lock_output(tmp_path / "out"):
            pass
    assert not list((tmp_path / "out").iterdir())


def test_disks_without_locks_are_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unsupported(*_: object) -> None:
        raise OSError(38, "Function not implemented")

    warnings: list[str] = []
    monkeypatch.setattr(locks.fcntl, "flock", unsupported)
    monkeypatch.setattr(locks.logger, "warning", warnings.append)
    with lock_output(tmp_path / "out"):
        pass
    assert "no file locks" in warnings[0]


def test_a_file_is_written_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real" / "file")
    write_text(tmp_path / "link", "text")
    assert (tmp_path / "real" / "file").read_text() == "text"
    assert (tmp_path / "link").is_symlink()
    assert not list(tmp_path.rglob("*.tmp"))
