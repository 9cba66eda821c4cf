"""Runs that are killed, run out of disk or find damaged checkpoints resume, and end with bit-identical weights."""

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

from hf_posenc.checkpoints import RUN_STATE_FILE, list_checkpoints, verify_manifest
from hf_posenc.cli import app
from hf_posenc.errors import PosEncError
from hf_posenc.training import Recipe, RecoveryTrainer, TrainRequest, checkpointing, train
from hf_posenc.training.checkpointing import STAGING_DIRECTORY
from tests.support import word_level_tokenizer as word_level

EVENTS = {"open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "shutil.rmtree"}
STEPS, MAX_KILLS = 6, 24
RECIPE = Recipe(fit_ratio=0.1)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("source")
    word_level.saved("gpt2", directory / "stock", attn_pdrop=0.1)  # so that the random state matters
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
    options = {"scheme": "t5", "train_length": "16", "recipe": RECIPE, **changes}
    return train(TrainRequest(model=str(source / "stock"), data=str(source / "text.txt"), **options), arguments)


def final_weights(out: Path) -> bytes:
    return (out / "model.safetensors").read_bytes()


@pytest.fixture(scope="module")
def uninterrupted(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run(source, tmp_path_factory.mktemp("uninterrupted") / "out")


def run_and_kill(source: Path, out: Path, kill_at: int | None, pipe: Any) -> None:
    """Run, and die at the n-th file system event in the directory; without n, send the number of events."""
    count = 0

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal count
        if event in EVENTS and str(arguments[0]).startswith(str(out)):
            count += 1
            if count == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(watch)
    run(source, out)
    pipe.send(count)


def run_in_process(source: Path, out: Path, kill_at: int | None) -> tuple[int | None, int | None]:
    """The exit code of a run in another process, and its number of file system events."""
    context = multiprocessing.get_context("fork")
    parent_end, child_end = context.Pipe()
    process = context.Process(target=run_and_kill, args=(source, out, kill_at, child_end))
    process.start()
    process.join(120)
    assert process.exitcode is not None, "the run hangs"
    return process.exitcode, parent_end.recv() if parent_end.poll() else None


@pytest.fixture(scope="module")
def num_events(source: Path, tmp_path_factory: pytest.TempPathFactory) -> int:
    code, count = run_in_process(source, tmp_path_factory.mktemp("counted") / "out", None)
    assert code == 0
    assert count is not None
    assert count > MAX_KILLS
    return count


FAST_KILL = 14
KILLS = [pytest.param(n, marks=[] if n == FAST_KILL else [pytest.mark.slow]) for n in range(MAX_KILLS)]


@pytest.mark.parametrize("kill", KILLS)
def test_killed_run_resumes(kill: int, source: Path, uninterrupted: Path, num_events: int, tmp_path: Path) -> None:
    out = tmp_path / "out"
    code, _ = run_in_process(source, out, 1 + kill * (num_events - 1) // MAX_KILLS)
    assert code == -signal.SIGKILL
    for checkpoint in list_checkpoints(out):
        assert verify_manifest(checkpoint) is None, "every checkpoint is complete"
    assert not json.loads((out / RUN_STATE_FILE).read_text())["finished"] if (out / RUN_STATE_FILE).is_file() else True
    run(source, out)
    assert final_weights(out) == final_weights(uninterrupted)
    assert not (out / STAGING_DIRECTORY).exists()


@pytest.mark.slow
@pytest.mark.parametrize("method", ["_load_optimizer_and_scheduler", "_load_rng_state"])
def test_result_depends_on_the_restored_state(
    method: str, source: Path, uninterrupted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control of the test above: without the optimizer or random state, the weights differ."""
    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr(RecoveryTrainer, "training_step", _interrupt_at(3))
        with pytest.raises(KeyboardInterrupt):
            run(source, out)
    monkeypatch.setattr(RecoveryTrainer, method, lambda self, checkpoint: None)
    run(source, out)
    assert final_weights(out) != final_weights(uninterrupted)


def _interrupt_at(step: int) -> Any:
    stock = RecoveryTrainer.training_step

    def training_step(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.state.global_step == step:
            raise KeyboardInterrupt
        return stock(self, *args, **kwargs)

    return training_step


@pytest.mark.slow
def test_adapters_resume(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint has them merged into its weights, and in a file of their own."""
    whole = run(source, tmp_path / "whole", trainable="lora", lora_rank=2)
    with monkeypatch.context() as patch:
        patch.setattr(RecoveryTrainer, "training_step", _interrupt_at(3))
        with pytest.raises(KeyboardInterrupt):
            run(source, tmp_path / "out", trainable="lora", lora_rank=2)
    assert final_weights(run(source, tmp_path / "out", trainable="lora", lora_rank=2)) == final_weights(whole)


@pytest.mark.slow
def test_disk_full_while_writing_the_manifest(
    source: Path, uninterrupted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(directory: Path) -> None:
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr(checkpointing, "write_manifest", full)
        with pytest.raises(PosEncError, match="No space left"):
            run(source, out)
    assert [path.name for path in out.iterdir()] == [RUN_STATE_FILE]
    run(source, out)
    assert final_weights(out) == final_weights(uninterrupted)


@pytest.mark.slow
@pytest.mark.parametrize(
    "error",
    [OSError(errno.ENOSPC, "No space left on device"), SafetensorError("No space left on device (os error 28)")],
)
def test_disk_full_while_writing_state(
    error: Exception, source: Path, uninterrupted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    write = checkpointing.write_state

    def full(state: Any, path: Path) -> None:
        if "checkpoint-4" in str(path):
            raise error
        write(state, path)

    with monkeypatch.context() as patch:
        patch.setattr(checkpointing, "write_state", full)
        with pytest.raises(PosEncError, match="No space left.*resume"):
            run(source, out)
    assert [path.name for path in out.glob("*-*")] == ["checkpoint-2"]
    assert not (out / STAGING_DIRECTORY).exists()
    run(source, out)
    assert final_weights(out) == final_weights(uninterrupted)


@pytest.mark.parametrize(
    "file",
    [
        "model.safetensors",
        pytest.param("optimizer.safetensors", marks=pytest.mark.slow),
        pytest.param("trainer_state.json", marks=pytest.mark.slow),
    ],
)
def test_damaged_checkpoint_is_not_resumed(
    file: str, source: Path, uninterrupted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr(RecoveryTrainer, "training_step", _interrupt_at(5))
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
    assert final_weights(out) == final_weights(uninterrupted)


class Trap:
    """Creates a file when unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


@pytest.mark.slow
def test_pickles_in_a_checkpoint_are_not_read(
    source: Path, uninterrupted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under the names that Trainer would load."""
    out, sprung = tmp_path / "out", tmp_path / "sprung"
    with monkeypatch.context() as patch:
        patch.setattr(RecoveryTrainer, "training_step", _interrupt_at(5))
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
    assert final_weights(out) == final_weights(uninterrupted)


def test_changed_text_or_scheme_is_refused(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr(RecoveryTrainer, "training_step", _interrupt_at(3))
        with pytest.raises(KeyboardInterrupt):
            run(source, out)
    with pytest.raises(PosEncError, match="scheme was 't5' and is now 'alibi'"):
        run(source, out, scheme="alibi")
    changed = tmp_path / "changed"
    changed.mkdir()
    (changed / "stock").symlink_to(source / "stock")
    (changed / "text.txt").write_text(word_level.text(2000, seed=1))
    text = (source / "text.txt").read_text()
    try:
        (source / "text.txt").write_text(word_level.text(2000, seed=1))
        with pytest.raises(PosEncError, match="sha256 was"):
            run(source, out)
    finally:
        (source / "text.txt").write_text(text)
    assert [path.name for path in out.glob("checkpoint-*")] == ["checkpoint-2"]


def test_interrupt_leaves_no_partial_files(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RecoveryTrainer, "training_step", _interrupt_at(3))
    options = {"model": source / "stock", "data": source / "text.txt", "scheme": "t5", "train-length": 16}
    options |= {"output-dir": tmp_path / "out", "max-steps": 6, "save-steps": 2, "use-cpu": True}
    line = [text for name, value in options.items() for text in (f"--{name}", str(value))]
    result = CliRunner().invoke(app, ["train", *line])
    assert result.exit_code == 1
    assert "interrupted" in result.output
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["checkpoint-2", RUN_STATE_FILE]
