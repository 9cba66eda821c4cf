"""Runs that are killed, run out of disk, find damage or are asked for something else: nothing is lost, and what comes
out in the end is what would have come out anyway, to the bit."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import pickle
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from transformers import TrainingArguments
from typer.testing import CliRunner

from hf_posenc.checkpoints.manifest import verify_manifest
from hf_posenc.cli import app
from hf_posenc.training import saving
from hf_posenc.training.recipe import Recipe
from hf_posenc.training.recovering import RecoveryTrainer
from hf_posenc.training.request import NOTE, Request
from hf_posenc.training.run import train
from hf_posenc.training.saving import UNFINISHED, OutOfSpace
from tests.support import word_level_tokenizer as word_level

EVENTS = {"open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "shutil.rmtree"}
STEPS, MOST_KILLS = 6, 24
RECIPE = Recipe(fit=0.1)
"""Everything that has a state of its own."""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("source")
    word_level.saved("gpt2", directory / "stock", attn_pdrop=0.1)  # so that what is drawn at random matters
    (directory / "text.txt").write_text(word_level.text(2000))
    return directory


def run(source: Path, out: Path, **changes: Any) -> Path:
    arguments = TrainingArguments(
        output_dir=str(out),
        max_steps=STEPS,
        per_device_train_batch_size=4,
        learning_rate=3e-3,
        logging_steps=1,
        save_steps=2,
        save_total_limit=2,
        use_cpu=True,
        disable_tqdm=True,
        report_to="none",
    )
    asked = {"scheme": "t5", "train_length": "16", "recipe": RECIPE, **changes}
    return train(Request(model=str(source / "stock"), data=str(source / "text.txt"), **asked), arguments)


def result(out: Path) -> bytes:
    return (out / "model.safetensors").read_bytes()


@pytest.fixture(scope="module")
def undisturbed(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run(source, tmp_path_factory.mktemp("undisturbed") / "out")


def in_another_process(source: Path, out: Path, last: int | None, pipe: Any) -> None:
    """Dies at the moment that it touches the directory for the n-th time; without n, says how often that was."""
    count = 0

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal count
        if event in EVENTS and str(arguments[0]).startswith(str(out)):
            count += 1
            if count == last:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(watch)
    run(source, out)
    pipe.send(count)


def started(source: Path, out: Path, last: int | None) -> tuple[int | None, int | None]:
    """The exit code of a run in another process, and how often it touched its directory."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    process = context.Process(target=in_another_process, args=(source, out, last, theirs))
    process.start()
    process.join(120)
    assert process.exitcode is not None, "the run hangs"
    return process.exitcode, ours.recv() if ours.poll() else None


@pytest.fixture(scope="module")
def touches(source: Path, tmp_path_factory: pytest.TempPathFactory) -> int:
    code, count = started(source, tmp_path_factory.mktemp("counted") / "out", None)
    assert code == 0
    assert count is not None
    assert count > MOST_KILLS
    return count


CHOSEN = (5, 14, 21)
"""Of the places to be killed at, spread evenly over the run, those that are tried by `make test`."""
PLACES = [pytest.param(n, marks=[] if n in CHOSEN else [pytest.mark.slow]) for n in range(MOST_KILLS)]


@pytest.mark.parametrize("place", PLACES)
def test_a_run_that_was_killed_ends_as_if_it_had_not(
    place: int, source: Path, undisturbed: Path, touches: int, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    code, _ = started(source, out, 1 + place * (touches - 1) // MOST_KILLS)
    assert code == -signal.SIGKILL
    for checkpoint in saving.checkpoints_in(out):
        assert verify_manifest(checkpoint) is None, "what is called a checkpoint is whole"
    assert not json.loads((out / NOTE).read_text())["finished"] if (out / NOTE).is_file() else True
    run(source, out)
    assert result(out) == result(undisturbed)
    assert not (out / UNFINISHED).exists()


def test_the_result_depends_on_what_is_restored(
    source: Path, undisturbed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control of the test above: without the state of the optimizer, or of chance, the end is another."""
    for forgotten in ("_load_optimizer_and_scheduler", "_load_rng_state"):
        out = tmp_path / forgotten
        with monkeypatch.context() as patch:
            patch.setattr(RecoveryTrainer, "training_step", _interrupted_at(3))
            with pytest.raises(KeyboardInterrupt):
                run(source, out)
        with monkeypatch.context() as patch:
            patch.setattr(RecoveryTrainer, forgotten, lambda self, checkpoint: None)
            run(source, out)
        assert result(out) != result(undisturbed), forgotten


def _interrupted_at(step: int) -> Any:
    stock = RecoveryTrainer.training_step

    def training_step(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.state.global_step == step:
            raise KeyboardInterrupt
        return stock(self, *args, **kwargs)

    return training_step


def test_adapters_go_on_too(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a checkpoint they are merged into the weights, and kept apart to go on from."""
    whole = run(source, tmp_path / "whole", trained="lora", lora_rank=2)
    with monkeypatch.context() as patch:
        patch.setattr(RecoveryTrainer, "training_step", _interrupted_at(3))
        with pytest.raises(KeyboardInterrupt):
            run(source, tmp_path / "out", trained="lora", lora_rank=2)
    assert result(run(source, tmp_path / "out", trained="lora", lora_rank=2)) == result(whole)


def test_a_disk_that_is_full_when_the_list_is_written(
    source: Path, undisturbed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(directory: Path) -> None:
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr(saving, "write_manifest", full)
        with pytest.raises(OutOfSpace, match="make room"):
            run(source, out)
    assert [path.name for path in out.iterdir()] == [NOTE]
    run(source, out)
    assert result(out) == result(undisturbed)


@pytest.mark.parametrize(
    "error",
    [OSError(errno.ENOSPC, "No space left on device"), SafetensorError("No space left on device (os error 28)")],
)
def test_a_full_disk_costs_nothing_but_time(
    error: Exception, source: Path, undisturbed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    write = saving.write_state

    def full(state: Any, path: Path) -> None:
        if "checkpoint-4" in str(path):
            raise error
        write(state, path)

    with monkeypatch.context() as patch:
        patch.setattr(saving, "write_state", full)
        with pytest.raises(OutOfSpace, match="make room.*give the same command again"):
            run(source, out)
    assert [path.name for path in out.glob("*-*")] == ["checkpoint-2"]
    assert not (out / UNFINISHED).exists()
    run(source, out)
    assert result(out) == result(undisturbed)


@pytest.mark.parametrize("file", ["model.safetensors", "optimizer.safetensors", "trainer_state.json"])
def test_a_damaged_checkpoint_is_passed_over(
    file: str, source: Path, undisturbed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr(RecoveryTrainer, "training_step", _interrupted_at(5))
        with pytest.raises(KeyboardInterrupt):
            run(source, out)
    damaged = out / "checkpoint-4" / file
    damaged.write_bytes(damaged.read_bytes()[:-9] + b"123456789")
    resumed = []
    stock = RecoveryTrainer.train

    def spy(self: Any, resume_from_checkpoint: Any = None, **kwargs: Any) -> Any:
        resumed.append(Path(resume_from_checkpoint).name)
        return stock(self, resume_from_checkpoint=resume_from_checkpoint, **kwargs)

    monkeypatch.setattr(RecoveryTrainer, "train", spy)
    run(source, out)
    assert resumed == ["checkpoint-2"]
    assert result(out) == result(undisturbed)


class Trap:
    """Unpickled, it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def test_no_pickle_in_a_checkpoint_is_read(
    source: Path, undisturbed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under the names by which a Trainer would look for them."""
    out, sprung = tmp_path / "out", tmp_path / "sprung"
    with monkeypatch.context() as patch:
        patch.setattr(RecoveryTrainer, "training_step", _interrupted_at(5))
        with pytest.raises(KeyboardInterrupt):
            run(source, out)
    names = ("optimizer.pt", "scheduler.pt", "scaler.pt", "rng_state.pth", "training_args.bin", "pytorch_model.bin")
    for name in names:
        (out / "checkpoint-4" / name).write_bytes(pickle.dumps(Trap(sprung)))
    read: list[Any] = []
    monkeypatch.setattr(torch, "load", lambda *args, **kwargs: read.append(args))
    run(source, out)
    assert not read
    assert not sprung.exists()
    assert result(out) == result(undisturbed)


def test_another_text_or_scheme_is_noticed(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr(RecoveryTrainer, "training_step", _interrupted_at(3))
        with pytest.raises(KeyboardInterrupt):
            run(source, out)
    with pytest.raises(ValueError, match="scheme was 't5' and is 'alibi'"):
        run(source, out, scheme="alibi")
    changed = tmp_path / "changed"
    changed.mkdir()
    (changed / "stock").symlink_to(source / "stock")
    (changed / "text.txt").write_text(word_level.text(2000, seed=1))
    text = (source / "text.txt").read_text()
    try:
        (source / "text.txt").write_text(word_level.text(2000, seed=1))
        with pytest.raises(ValueError, match="sha256 was"):
            run(source, out)
    finally:
        (source / "text.txt").write_text(text)
    assert [path.name for path in out.glob("checkpoint-*")] == ["checkpoint-2"]


def test_an_interrupt_leaves_nothing_broken(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RecoveryTrainer, "training_step", _interrupted_at(3))
    options = {"model": source / "stock", "data": source / "text.txt", "scheme": "t5", "train-length": 16}
    options |= {"output-dir": tmp_path / "out", "max-steps": 6, "save-steps": 2, "use-cpu": True}
    line = [text for name, value in options.items() for text in (f"--{name}", str(value))]
    done = CliRunner().invoke(app, ["train", *line])
    assert done.exit_code == 1
    assert "nothing is left half written" in done.output
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["checkpoint-2", NOTE]
