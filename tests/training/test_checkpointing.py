"""State files without pickles, verified checkpoints, and the record of a run."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hf_posenc.checkpoints import RUN_STATE_FILE, verify_manifest, write_manifest
from hf_posenc.errors import PosEncError
from hf_posenc.training import TrainRequest
from hf_posenc.training.checkpointing import last_valid_checkpoint, rotate_checkpoints
from hf_posenc.training.run_state import RunState
from hf_posenc.training.state_files import get_rng_state, read_state, set_rng_state, write_state
from tests.support.training_runs import settings


def test_state_round_trip(tmp_path: Path) -> None:
    state = {
        "state": {0: {"step": torch.tensor(3.0), "exp_avg": torch.randn(2, 3)}, 1: {}},
        "param_groups": [{"lr": 0.1 + 0.2, "betas": (0.9, 0.999), "fused": None, "amsgrad": False, "params": [0, 1]}],
        "half": torch.randn(3).to(torch.bfloat16),
        "numbers": [np.float64(0.1), -1, "text"],
    }
    write_state(state, tmp_path / "state.safetensors")
    restored = read_state(tmp_path / "state.safetensors")
    assert restored["param_groups"] == state["param_groups"]
    assert torch.equal(restored["state"][0]["exp_avg"], state["state"][0]["exp_avg"])  # type: ignore[index]
    assert restored["state"][1] == {}
    assert restored["half"].dtype == torch.bfloat16
    assert restored["numbers"] == [0.1, -1, "text"]
    with pytest.raises(TypeError, match="set"):
        write_state({"x": {1, 2}}, tmp_path / "other.safetensors")


def test_optimizer_state_round_trip(tmp_path: Path) -> None:
    def steps(optimizer: Any, weight: torch.Tensor, count: int) -> None:
        for number in range(count):
            weight.grad = torch.full_like(weight, 0.1 * number + 0.3)
            optimizer.step()

    weight = torch.nn.Parameter(torch.ones(4))
    optimizer = torch.optim.AdamW([weight], lr=0.1)
    steps(optimizer, weight, 3)
    write_state(optimizer.state_dict(), tmp_path / "o.safetensors")
    other = torch.nn.Parameter(weight.detach().clone())
    restored = torch.optim.AdamW([other], lr=0.5)
    fresh = torch.nn.Parameter(weight.detach().clone())
    restored.load_state_dict(read_state(tmp_path / "o.safetensors"))
    for optimizer_, weight_ in ((optimizer, weight), (restored, other), (torch.optim.AdamW([fresh], lr=0.1), fresh)):
        steps(optimizer_, weight_, 3)
    assert torch.equal(other, weight)
    assert not torch.equal(fresh, weight), "control: without its state the result differs"


def test_rng_state_round_trip(tmp_path: Path) -> None:
    def draw() -> tuple[float, float, float, float]:
        return random.random(), np.random.rand(), float(np.random.randn()), torch.rand(()).item()

    np.random.randn()  # leaves a second normal number cached in the state
    write_state(get_rng_state(), tmp_path / "r.safetensors")
    first = draw()
    assert draw() != first
    set_rng_state(read_state(tmp_path / "r.safetensors"))
    assert draw() == first


def write_checkpoint(directory: Path) -> Path:
    directory.mkdir(parents=True)
    (directory / "weights").write_bytes(bytes(range(256)) * 10)
    (directory / "state.json").write_text("{}")
    write_manifest(directory)
    return directory


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def flip_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("damage", "file", "message"),
    [
        (Path.unlink, "weights", "weights is missing"),
        (truncate, "weights", "2,559 bytes"),
        (flip_bit, "weights", "checksum"),
        (Path.unlink, "manifest.json", "cannot be read"),
        (truncate, "manifest.json", "cannot be read"),
    ],
)
def test_damaged_checkpoint_is_skipped(
    damage: Any, file: str, message: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    older, newer = write_checkpoint(tmp_path / "checkpoint-5"), write_checkpoint(tmp_path / "checkpoint-10")
    assert verify_manifest(newer) is None
    assert last_valid_checkpoint(tmp_path) == newer
    damage(newer / file)
    problem = verify_manifest(newer)
    assert problem is not None
    assert message in problem
    assert last_valid_checkpoint(tmp_path) == older
    rotate_checkpoints(older, 1, None)
    assert older.is_dir(), "a damaged checkpoint of a later step does not count"
    older.rename(tmp_path / "checkpoint-x")
    assert last_valid_checkpoint(tmp_path) is None


REQUEST = TrainRequest(model="m", data="d", train_length="8", scheme={"type": "alibi"})


def run_state(directory: Path, request: TrainRequest = REQUEST, restart: bool = False, **changes: Any) -> RunState:
    return RunState(directory, request, settings(directory, **changes), restart)


def test_resuming_requires_the_same_arguments_and_data(tmp_path: Path) -> None:
    first = run_state(tmp_path)
    first.set_dataset({"num_rows": 3, "sha256": "x"})
    first.save()
    resumed = run_state(tmp_path)
    resumed.set_dataset({"num_rows": 3, "sha256": "x"})
    with pytest.raises(PosEncError, match=r"learning_rate was 0.003 and is now 0.2"):
        run_state(tmp_path, learning_rate=0.2)
    with pytest.raises(PosEncError, match="rows_per_step was 4 and is now 8"):
        run_state(tmp_path, gradient_accumulation_steps=2)
    run_state(tmp_path, gradient_accumulation_steps=2, per_device_train_batch_size=2)
    with pytest.raises(PosEncError, match="scheme was"):
        run_state(tmp_path, TrainRequest(model="m", data="d", train_length="8", scheme="t5"))
    with pytest.raises(PosEncError, match="sha256 was 'x' and is now 'y'"):
        run_state(tmp_path).set_dataset({"num_rows": 3, "sha256": "y"})
    resumed.save(finished=True)
    with pytest.raises(PosEncError, match="finished run"):
        run_state(tmp_path)


def test_only_directories_of_runs_are_cleared(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "checkpoint-3").mkdir()
    for restart in (False, True):
        with pytest.raises(PosEncError, match="holds no training run"):
            run_state(tmp_path, restart=restart)
    (tmp_path / RUN_STATE_FILE).write_text(json.dumps({"finished": True}))
    for name in ("tokenizer.json", "generation_config.json", "training_args.json", "mine.txt"):
        (tmp_path / name).write_text("from an earlier run")
    run_state(tmp_path, restart=True).clear()
    assert {path.name for path in tmp_path.iterdir()} == {RUN_STATE_FILE, "mine.txt"}
    run_state(tmp_path)  # if it is interrupted now, the directory still counts as a run's
    (tmp_path / RUN_STATE_FILE).write_text("{")
    with pytest.raises(PosEncError, match="run.json is not a valid JSON file"):
        run_state(tmp_path)


def test_a_run_killed_while_clearing_is_cleared_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else it would resume from a checkpoint of the earlier run."""
    first = run_state(tmp_path)
    first.set_dataset({"num_rows": 3})
    first.save(measured={"swapped": {"eval_loss": 1.0}})
    (tmp_path / "checkpoint-3").mkdir()

    def killed(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    restarted = run_state(tmp_path, restart=True, learning_rate=0.2)
    with monkeypatch.context() as patch:
        patch.setattr("hf_posenc.training.run_state.shutil.rmtree", killed)
        with pytest.raises(KeyboardInterrupt):
            restarted.clear()
    assert (tmp_path / "checkpoint-3").is_dir()
    again = run_state(tmp_path, learning_rate=0.2)
    assert again.needs_clearing
    assert not again.measured
    again.clear()
    assert [path.name for path in tmp_path.iterdir()] == [RUN_STATE_FILE]
    assert not run_state(tmp_path, learning_rate=0.2).needs_clearing
