"""A model or teacher that is edited while a run is interrupted is noticed: nothing of both versions is mixed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from hf_posenc.checkpoints import RUN_STATE_FILE
from hf_posenc.errors import PosEncError
from hf_posenc.training import Recipe, RecoveryTrainer, fingerprints, train
from hf_posenc.training.data import SELF_EVAL_FILE, SELF_GENERATED_FILE
from hf_posenc.training.fingerprints import checkpoint_fingerprint, digest
from tests.support import word_level_tokenizer as word_level
from tests.support.training_runs import request, settings

pytest.importorskip("datasets", reason="the extra `train` is not installed")
RECIPE = Recipe(reorder_heads=False, fold_rotation=False, match_biases=False, fit_ratio=0.0)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    (tmp_path / "text.txt").write_text(word_level.text(400))
    for name in ("stock", "teacher"):
        word_level.saved("gpt2", tmp_path / name, n_layer=1)
    return tmp_path


def run(source: Path, restart: bool = False, **changes: Any) -> Path:
    options = {"data": source / "text.txt", "recipe": RECIPE, "scheme": "alibi", **changes}
    return train(request(source / "stock", **options), settings(source / "out", save_steps=1), restart)


def interrupt(source: Path, **changes: Any) -> None:
    step = RecoveryTrainer.training_step
    with pytest.MonkeyPatch.context() as patch:

        def training_step(self: Any, *args: Any, **kwargs: Any) -> Any:
            if self.state.global_step == 3:
                if self.teacher_cache is not None:
                    self.teacher_cache.flush()  # which a longer run does now and then
                raise KeyboardInterrupt
            return step(self, *args, **kwargs)

        patch.setattr(RecoveryTrainer, "training_step", training_step)
        with pytest.raises(KeyboardInterrupt):
            run(source, **changes)


@contextmanager
def edited(checkpoint: Path, name: str = "model.safetensors") -> Iterator[None]:
    path = checkpoint / name
    original = path.read_bytes()
    if path.suffix == ".json":
        path.write_text(json.dumps({**json.loads(original), "attn_pdrop": 0.25}))
    else:
        weights = load_file(path)
        save_file({key: value * 2 if "wte" in key else value for key, value in weights.items()}, path, {"format": "pt"})
    try:
        yield
    finally:
        path.write_bytes(original)


@pytest.mark.parametrize(
    ("role", "file", "changes"),
    [
        ("model", "model.safetensors", {}),
        ("model", "config.json", {}),
        ("model", "model.safetensors", {"cache_teacher": True}),
        ("model", "model.safetensors", {"data": "self", "self_generated_rows": 8}),
        ("teacher", "model.safetensors", {"teacher_model": "TEACHER", "cache_teacher": True}),
    ],
)
def test_edited_checkpoints_are_refused(role: str, file: str, changes: dict[str, Any], source: Path) -> None:
    if "teacher_model" in changes:
        changes = {**changes, "teacher_model": str(source / "teacher")}
    interrupt(source, **changes)
    before = {path.name for path in (source / "out").iterdir()}
    checkpoint = source / ("stock" if role == "model" else "teacher")
    with edited(checkpoint, file), pytest.raises(PosEncError, match=f"The {role} .*{checkpoint.name} has ch.*: {file}"):
        run(source, **changes)
    assert {path.name for path in (source / "out").iterdir()} == before
    run(source, **changes)
    assert json.loads((source / "out" / RUN_STATE_FILE).read_text())["finished"]


def test_an_edited_checkpoint_can_be_trained_from_the_start(source: Path) -> None:
    interrupt(source)
    with edited(source / "stock"):
        run(source, restart=True)


def test_files_name_the_weights_that_they_come_from(source: Path) -> None:
    """So that they are not taken for those of edited weights if the run had not recorded its start."""
    options = {"data": "self", "self_generated_rows": 8, "self_eval_rows": 2, "cache_teacher": True}
    interrupt(source, **options)
    weights = digest(checkpoint_fingerprint(str(source / "stock")))
    for name in (SELF_GENERATED_FILE, SELF_EVAL_FILE):
        with safe_open(source / "out" / name, "pt") as file:
            assert file.metadata()["sha256"] == weights
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fingerprints, "_sha256", lambda path: "another")
        (source / "out" / RUN_STATE_FILE).write_text("{}")
        with pytest.raises(PosEncError, match="teacher_cache has predictions of .*sha256"):
            run(source, **options)
        with safe_open(source / "out" / SELF_GENERATED_FILE, "pt") as file:
            assert file.metadata()["sha256"] not in ("", weights)


def test_fingerprints(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stock, teacher = (checkpoint_fingerprint(str(source / name)) for name in ("stock", "teacher"))
    assert stock.keys() == {"config.json", "model.safetensors"}
    assert stock == teacher, "two copies of a model"
    with edited(source / "teacher"):
        assert digest(checkpoint_fingerprint(str(source / "teacher"))) != digest(stock)
    snapshot = source / "snapshots" / "4f3a"
    monkeypatch.setattr(fingerprints, "find_checkpoint", lambda *_: snapshot)
    assert checkpoint_fingerprint("me/model", "main") == {"commit": "4f3a"}


def test_runs_without_fingerprints_can_be_resumed(source: Path) -> None:
    """As an earlier release has recorded them."""
    interrupt(source)
    path = source / "out" / RUN_STATE_FILE
    values = json.loads(path.read_text())
    del values["checkpoints"]
    path.write_text(json.dumps(values))
    run(source)
    path.write_text(json.dumps({**values, "checkpoints": {"model": 5}, "finished": False}))
    with pytest.raises(PosEncError, match="The model .* has changed"):
        run(source)
