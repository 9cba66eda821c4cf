"""Predictions of a teacher on disk: what is read back, what is refused, and when the teacher need not run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hf_posenc.errors import PosEncError
from hf_posenc.training import RecoveryTrainer, Teacher, TeacherCache
from hf_posenc.training.divergence import kl_divergence, top_log_probs
from tests.support import tiny_models as tiny
from tests.support.training_runs import settings

NAME = "a teacher"


def logits(rows: int = 2, length: int = 12, seed: int = 0) -> torch.Tensor:
    return 3 * torch.randn(rows, length, tiny.VOCABULARY, generator=torch.Generator().manual_seed(seed))


def test_predictions_survive_on_disk(tmp_path: Path) -> None:
    inputs = {"input_ids": tiny.tokens()}
    cache = TeacherCache(tmp_path, teacher=NAME, top_k=8)
    assert cache.get(inputs) is None
    cache.put(inputs, logits())
    expected = top_log_probs(logits(), 8)
    unwritten = cache.get(inputs)
    assert not list(tmp_path.iterdir())
    cache.flush()
    other_process = TeacherCache(tmp_path, teacher=NAME, top_k=8)
    for top in (unwritten, cache.get(inputs), other_process.get(inputs)):
        assert top is not None
        assert torch.equal(top.ids_BNK, expected.ids_BNK)
        torch.testing.assert_close(top.log_probs_BNK.float(), expected.log_probs_BNK, rtol=1e-3, atol=0)
        assert torch.equal(top.log_rest_BN, expected.log_rest_BN)
    assert len(cache) == len(other_process) == 2
    assert other_process.get({"input_ids": tiny.tokens(seed=1)}) is None, "control: other rows"


def test_whole_vocabulary_gives_the_full_divergence(tmp_path: Path) -> None:
    inputs = {"input_ids": tiny.tokens()}
    cache = TeacherCache(tmp_path, teacher=NAME, top_k=10**6, dtype=torch.float32)
    cache.put(inputs, logits())
    cache.flush()
    top = cache.get(inputs)
    assert top is not None
    student = logits(seed=1)
    torch.testing.assert_close(kl_divergence(top, student), kl_divergence(logits(), student), rtol=1e-5, atol=0)


def test_rows_are_recognized_in_other_batches(tmp_path: Path) -> None:
    """In another order and with other padding, but not with other positions."""
    ids = tiny.tokens(2, 6)
    cache = TeacherCache(tmp_path, teacher=NAME, top_k=4)
    mask = torch.tensor([[1] * 6, [1] * 4 + [0] * 2])
    positions = torch.arange(6).repeat(2, 1)
    predictions = logits(2, 6)
    cache.put({"input_ids": ids, "attention_mask": mask, "position_ids": positions}, predictions)
    cache.flush()
    padded = torch.nn.functional.pad(ids[1:, :4], (3, 0))
    wider = {"input_ids": padded, "attention_mask": torch.tensor([[0] * 3 + [1] * 4])}
    top = cache.get({**wider, "position_ids": torch.tensor([[0] * 3 + [0, 1, 2, 3]])})
    assert top is not None
    assert torch.equal(top.ids_BNK[0, 3:], top_log_probs(predictions, 4).ids_BNK[1, :4])
    student = logits(1, 7, seed=1)
    assert kl_divergence(top, student, wider["attention_mask"]).isfinite()
    assert cache.get({**wider, "position_ids": torch.tensor([[0] * 3 + [0, 1, 0, 1]])}) is None
    assert cache.get(wider) is None


def test_several_processes_share_a_directory(tmp_path: Path) -> None:
    first, second = (TeacherCache(tmp_path, teacher=NAME, tokens_per_file=10) for _ in range(2))
    for number, cache in enumerate((first, second)):
        cache.put({"input_ids": tiny.tokens(1, seed=number)}, logits(1, seed=number))
    assert len(list(tmp_path.iterdir())) == 2
    together = torch.cat([tiny.tokens(1, seed=number) for number in range(2)])
    for cache in (first, second):
        assert cache.get({"input_ids": together}) is not None


def test_partial_and_foreign_files(tmp_path: Path) -> None:
    inputs = {"input_ids": tiny.tokens()}
    cache = TeacherCache(tmp_path, teacher=NAME)
    cache.put(inputs, logits())
    cache.flush()
    (path,) = tmp_path.iterdir()
    content = path.read_bytes()
    path.with_suffix(".new").write_bytes(content[: len(content) // 2])
    assert TeacherCache(tmp_path, teacher=NAME).get(inputs) is not None
    path.write_bytes(content[: len(content) // 2])
    assert TeacherCache(tmp_path, teacher=NAME).get(inputs) is None
    path.write_bytes(content)
    for changes in ({"teacher": "another"}, {"top_k": 3}, {"dtype": torch.float32}):
        with pytest.raises(PosEncError, match="choose another directory"):
            TeacherCache(tmp_path, **{"teacher": NAME, **changes})  # type: ignore[arg-type]
    with pytest.raises(PosEncError, match="at least 1"):
        TeacherCache(tmp_path, teacher=NAME, top_k=0)


@pytest.mark.parametrize(
    ("until", "runs"),
    [(0.5, 4), pytest.param(1.0, 8, marks=pytest.mark.slow), pytest.param(0.0, 4, marks=pytest.mark.slow)],
)
def test_teacher_runs_once_per_row(until: float, runs: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two epochs of four steps: in the second the teacher runs only if hidden states are still compared."""
    rows = [{"input_ids": ids, "labels": ids} for ids in tiny.tokens(8)]
    model = tiny.model("llama", "t5", torch.float32)
    teacher = Teacher(tiny.model("llama", dtype=torch.float32))
    calls: list[Any] = []
    original = teacher.forward
    monkeypatch.setattr(teacher, "forward", lambda *args, **kwargs: calls.append(0) or original(*args, **kwargs))
    arguments = settings(tmp_path / "out", max_steps=8, per_device_train_batch_size=2, save_strategy="no")
    cache = TeacherCache(tmp_path / "teacher", teacher=NAME)
    trainer = RecoveryTrainer(
        model=model,
        args=arguments,
        train_dataset=rows,
        teacher=teacher,
        teacher_cache=cache,
        hidden_loss_until=until,
    )
    trainer.train()
    assert len(calls) == runs
    assert len(TeacherCache(tmp_path / "teacher", teacher=NAME)) == 8
    losses = [entry["kl_loss"] for entry in trainer.state.log_history if "kl_loss" in entry]
    assert sum(losses[4:]) < sum(losses[:4])
