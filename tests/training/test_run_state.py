"""What a run writes: states without pickles, directories that are whole, and the note of what was asked for."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hf_posenc.checkpoints.manifest import MANIFEST, verify_manifest, write_manifest
from hf_posenc.training.request import NOTE, Note, Request
from hf_posenc.training.saving import _drop_old, last_whole_checkpoint
from hf_posenc.training.state_files import random_state, read_state, set_random_state, write_state


def test_a_state_comes_back_as_it_was(tmp_path: Path) -> None:
    state = {
        "state": {0: {"step": torch.tensor(3.0), "exp_avg": torch.randn(2, 3)}, 1: {}},
        "param_groups": [{"lr": 0.1 + 0.2, "betas": (0.9, 0.999), "fused": None, "amsgrad": False, "params": [0, 1]}],
        "half": torch.randn(3).to(torch.bfloat16),
        "numbers": [np.float64(0.1), -1, "text"],
    }
    write_state(state, tmp_path / "state.safetensors")
    found = read_state(tmp_path / "state.safetensors")
    assert found["param_groups"][0] == {**state["param_groups"][0], "betas": [0.9, 0.999]}  # type: ignore[index]
    assert torch.equal(found["state"][0]["exp_avg"], state["state"][0]["exp_avg"])  # type: ignore[index]
    assert found["state"][1] == {}
    assert found["half"].dtype == torch.bfloat16
    assert found["numbers"] == [0.1, -1, "text"]
    with pytest.raises(TypeError, match="a set cannot be kept"):
        write_state({"x": {1, 2}}, tmp_path / "other.safetensors")


def test_an_optimizer_goes_on_as_if_nothing_had_been(tmp_path: Path) -> None:
    def steps(optimizer: Any, weight: torch.Tensor, count: int) -> None:
        for number in range(count):
            weight.grad = torch.full_like(weight, 0.1 * number + 0.3)
            optimizer.step()

    weight = torch.nn.Parameter(torch.ones(4))
    optimizer = torch.optim.AdamW([weight], lr=0.1)
    steps(optimizer, weight, 3)
    write_state(optimizer.state_dict(), tmp_path / "o.safetensors")
    other = torch.nn.Parameter(weight.detach().clone())
    again = torch.optim.AdamW([other], lr=0.5)
    fresh = torch.nn.Parameter(weight.detach().clone())
    again.load_state_dict(read_state(tmp_path / "o.safetensors"))
    for optimizer_, weight_ in ((optimizer, weight), (again, other), (torch.optim.AdamW([fresh], lr=0.1), fresh)):
        steps(optimizer_, weight_, 3)
    assert torch.equal(other, weight)
    assert not torch.equal(fresh, weight), "without its state it goes elsewhere"


def test_what_is_drawn_goes_on(tmp_path: Path) -> None:
    def drawn() -> tuple[float, float, float, float]:
        return random.random(), np.random.rand(), float(np.random.randn()), torch.rand(()).item()

    np.random.randn()  # leaves a number in store, which belongs to the state
    write_state(random_state(), tmp_path / "r.safetensors")
    first = drawn()
    assert drawn() != first
    set_random_state(read_state(tmp_path / "r.safetensors"))
    assert drawn() == first


def sealed(directory: Path) -> Path:
    directory.mkdir(parents=True)
    (directory / "weights").write_bytes(bytes(range(256)) * 10)
    (directory / "state.json").write_text("{}")
    write_manifest(directory)
    return directory


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("harm", "file", "told"),
    [
        (Path.unlink, "weights", "weights is missing"),
        (cut, "weights", "2,559 bytes and should have 2,560"),
        (flip, "weights", "weights is not what was written"),
        (Path.unlink, MANIFEST, "cannot be read"),
        (cut, MANIFEST, "cannot be read"),
    ],
)
def test_damage_is_noticed_and_passed_over(
    harm: Any, file: str, told: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    older, newer = sealed(tmp_path / "checkpoint-5"), sealed(tmp_path / "checkpoint-10")
    assert verify_manifest(newer) is None
    assert last_whole_checkpoint(tmp_path) == newer
    harm(newer / file)
    problem = verify_manifest(newer)
    assert problem is not None
    assert told in problem
    assert last_whole_checkpoint(tmp_path) == older
    _drop_old(older, 1, None)
    assert older.is_dir(), "a damaged one of a later step is not what the run goes on from"
    older.rename(tmp_path / "checkpoint-x")
    assert last_whole_checkpoint(tmp_path) is None


REQUEST = Request(model="m", data="d", train_length="8", scheme={"type": "alibi"})
SETTINGS = {"learning_rate": 0.1, "max_steps": 5}


def note(directory: Path, request: Request = REQUEST, **settings: Any) -> Note:
    return Note.of(directory, request, {**SETTINGS, **settings}, restart=False)


def test_a_run_goes_on_only_as_it_was_asked_for(tmp_path: Path) -> None:
    first = note(tmp_path)
    first.add_rows({"count": 3, "sha256": "x"})
    first.write()
    again = note(tmp_path)
    again.add_rows({"count": 3, "sha256": "x"})
    with pytest.raises(ValueError, match="learning_rate was 0.1 and is 0.2"):
        note(tmp_path, learning_rate=0.2)
    with pytest.raises(ValueError, match="scheme was"):
        note(tmp_path, Request(model="m", data="d", train_length="8", scheme="t5"))
    with pytest.raises(ValueError, match="sha256 was 'x' and is 'y'"):
        note(tmp_path).add_rows({"count": 3, "sha256": "y"})
    again.write(finished=True)
    with pytest.raises(ValueError, match="holds a finished run"):
        note(tmp_path)


def test_a_directory_of_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "checkpoint-3").mkdir()
    for restart in (False, True):
        with pytest.raises(ValueError, match="something else"):
            Note.of(tmp_path, REQUEST, SETTINGS, restart)
    (tmp_path / NOTE).write_text(json.dumps({"finished": True}))
    for name in ("tokenizer.json", "generation_config.json", "training_args.json", "mine.txt"):
        (tmp_path / name).write_text("of the run before")
    Note.of(tmp_path, REQUEST, SETTINGS, restart=True).clear()
    assert {path.name for path in tmp_path.iterdir()} == {NOTE, "mine.txt"}
    Note.of(tmp_path, REQUEST, SETTINGS, restart=False)  # cut short now, it still is the directory of a run
    (tmp_path / NOTE).write_text("{")
    with pytest.raises(ValueError, match=r"cannot be read.*--restart"):
        note(tmp_path)
