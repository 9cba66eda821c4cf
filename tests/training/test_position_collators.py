"""Collators that choose positions: what they choose, that models honour it, and training runs with them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import DataCollatorWithPadding, Trainer

from hf_posenc.errors import PosEncError
from hf_posenc.training import (
    DataCollatorWithPoSE,
    DataCollatorWithPositions,
    DataCollatorWithRandomizedPositions,
    DataCollatorWithSHAPE,
    PositionEpochCallback,
    Recipe,
    RecoveryTrainer,
    train,
)
from hf_posenc.training.position_collators import contiguous_positions
from tests.support import tiny_models as tiny
from tests.support import word_level_tokenizer as word_level
from tests.support.cases import CASES, Case, pairs
from tests.support.training_runs import LENGTH, request, settings, weights

COLLATORS = [DataCollatorWithPoSE, DataCollatorWithRandomizedPositions, DataCollatorWithSHAPE]
TARGET = 64
by_collator = pytest.mark.parametrize("collator_class", COLLATORS)


def features(rows: int = 4, length: int = 12) -> list[dict[str, Any]]:
    return [{"input_ids": ids} for ids in tiny.tokens(rows, length).tolist()]


def packed_features(lengths: list[int], rows: int = 3) -> list[dict[str, Any]]:
    positions = [position for length in lengths for position in range(length)]
    return [{**feature, "position_ids": positions} for feature in features(rows, len(positions))]


@by_collator
def test_positions_ascend_below_the_target_length(collator_class: type[DataCollatorWithPositions]) -> None:
    batch = collator_class(TARGET)(features(600))
    positions = batch["position_ids"]
    assert (positions.diff() > 0).all()
    assert positions.min() >= 0
    assert positions.max() == TARGET - 1  # over many rows, the whole range is used
    assert batch["attention_mask"].all()
    assert len(positions.unique(dim=0)) > 20


def test_pose_skips_once_per_cut_and_starts_at_zero() -> None:
    for chunks in (2, 3, 5):
        positions = DataCollatorWithPoSE(TARGET, chunks=chunks)(features(100))["position_ids"]
        assert (positions[:, 0] == 0).all()
        jumps = (positions.diff() > 1).sum(-1)
        assert jumps.max() == chunks - 1
    generator, collator = np.random.default_rng(0), DataCollatorWithPoSE(TARGET)
    last = [collator.sample([12], generator)[0][-1] for _ in range(4000)]
    counts = np.bincount(last, minlength=TARGET)[11:]  # uniform over the last position, from 11 to 63
    assert (np.abs(counts / counts.mean() - 1) < 0.5).all()


def test_shape_shifts_whole_rows() -> None:
    positions = DataCollatorWithSHAPE(TARGET)(features(400))["position_ids"]
    assert (positions.diff() == 1).all()
    assert set(positions[:, 0].tolist()) == set(range(TARGET - 12 + 1))


def test_randomized_positions_are_uniform() -> None:
    generator, collator = np.random.default_rng(0), DataCollatorWithRandomizedPositions(TARGET)
    counts = np.bincount(np.concatenate(collator.sample([12] * 3000, generator)), minlength=TARGET)
    assert (np.abs(counts / counts.mean() - 1) < 0.25).all()


@by_collator
def test_positions_depend_on_seed_epoch_and_row_alone(collator_class: type[DataCollatorWithPositions]) -> None:
    rows, collator = features(), collator_class(TARGET, seed=3)
    expected = collator(rows)["position_ids"]
    assert torch.equal(collator(rows)["position_ids"], expected)
    assert torch.equal(collator_class(TARGET, seed=3)(rows[2:])["position_ids"], expected[2:])  # whatever the batch
    assert not torch.equal(collator_class(TARGET, seed=4)(rows)["position_ids"], expected)
    collator.set_epoch(1)
    assert not torch.equal(collator(rows)["position_ids"], expected)


@by_collator
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_gets_no_positions(collator_class: type[DataCollatorWithPositions], side: str) -> None:
    tokenizer = word_level.tokenizer()
    tokenizer.padding_side = side
    rows = [{"input_ids": row["input_ids"][:length]} for row, length in zip(features(3), (12, 7, 3), strict=True)]
    batch = collator_class(TARGET, DataCollatorWithPadding(tokenizer), first_position=2)(rows)
    for row, feature in enumerate(rows):
        real = batch["attention_mask"][row].bool()
        alone = collator_class(TARGET, first_position=2)([feature])["position_ids"][0]
        assert torch.equal(batch["position_ids"][row, real], alone)
        assert (batch["position_ids"][row, ~real] == 2).all()


@by_collator
@pytest.mark.parametrize("lengths", [[5, 4, 3], [1, 1, 1, 9], [3, 1, 2, 1, 5]])
def test_documents_of_a_packed_row_stay_apart(
    collator_class: type[DataCollatorWithPositions], lengths: list[int]
) -> None:
    """A variant computes for each document what it computes for it alone, at the chosen positions."""
    rows = packed_features(lengths)
    with pytest.raises(PosEncError, match="packed=True"):
        collator_class(TARGET)(rows)
    model = tiny.model("gpt2", ["sinusoidal", "alibi"])
    for seed in range(3):
        batch = collator_class(TARGET, packed=True, seed=seed)(rows)
        assert "attention_mask" not in batch
        assert batch["position_ids"].max() < TARGET
        assert torch.equal(contiguous_positions(batch["position_ids"])[0], torch.tensor(rows[0]["position_ids"]))
        with torch.no_grad():
            logits = model(**batch, use_cache=False).logits
            start = 0
            for length in lengths:
                document = {name: values[:1, start : start + length] for name, values in batch.items()}
                torch.testing.assert_close(
                    logits[:1, start : start + length], model(**document, use_cache=False).logits, rtol=0, atol=1e-10
                )
                start += length


@by_collator
def test_what_does_not_fit_is_refused(collator_class: type[DataCollatorWithPositions]) -> None:
    assert torch.equal(collator_class(12)(features())["position_ids"], torch.arange(12).expand(4, -1))
    with pytest.raises(PosEncError, match="12 tokens.*target_length 11"):
        collator_class(11)(features())
    with pytest.raises(PosEncError, match="jump already"):
        collator_class(TARGET)([{**row, "position_ids": [*range(6), *range(9, 15)]} for row in features()])
    with pytest.raises(PosEncError, match="one row per example"):
        collator_class(TARGET, lambda rows: {"input_ids": torch.zeros(1, 48)})(features())
    with pytest.raises(PosEncError, match="at least 1"):
        collator_class(0)
    with pytest.raises(PosEncError, match="chunks"):
        DataCollatorWithPoSE(TARGET, chunks=1)


READING = [case for case in CASES if not case.contextual and case.id != "none"]


@pairs(["bert", "gpt2", "llama"], READING, fast_cases=["t5", "rope+llama4", "tupe", "shaw", "window"])
def test_every_scheme_trains_at_positions_that_jump(case: Case, architecture: str) -> None:
    """The gradients equal those of a row with all positions, where the tokens that were skipped are masked out."""
    collator = DataCollatorWithPoSE(tiny.TRAINED_LENGTH, chunks=3, seed=1)
    (row,) = features(1, 12)
    batch = collator([row])
    kept = batch["position_ids"][0]
    assert kept[-1] > 11
    whole = tiny.tokens(1, int(kept[-1]) + 1, seed=7)
    whole[0, kept] = torch.tensor(row["input_ids"])
    visible = torch.zeros(whole.shape[1], dtype=torch.bool)
    visible[kept] = True
    square = torch.ones(len(visible), len(visible), dtype=torch.bool)
    mask = ((square if architecture == "bert" else square.tril()) & visible)[None, None]
    gradients = []
    for inputs in (batch, {"input_ids": whole, "attention_mask": mask}):
        model = tiny.model(architecture, case.scheme).train()
        options = {} if architecture == "bert" else {"use_cache": False}
        logits = model(**inputs, **options).logits
        logits = logits if inputs is batch else logits[:, kept]
        logits.square().mean().backward()
        gradients.append({name: parameter.grad for name, parameter in model.named_parameters()})
    for name, gradient in gradients[0].items():
        other = gradients[1][name]
        if gradient is None or other is None:
            assert gradient is None or not gradient.any()
            assert other is None or not other.any()
            continue
        torch.testing.assert_close(
            gradient, other, **tiny.tolerances(architecture), msg=lambda text, n=name: f"{n}: {text}"
        )


def test_a_stock_model_takes_jumps_for_jumps() -> None:
    """Thanks to the mask; the control: without one, transformers takes a jump for a new document."""
    model, batch = tiny.model("llama"), DataCollatorWithPoSE(TARGET, seed=1)(features(1))
    assert (batch["position_ids"].diff() > 1).any()
    changed = batch["input_ids"].clone()
    changed[:, 0] = 3 + (changed[:, 0] - 2) % (tiny.VOCABULARY - 3)

    def influence(inputs: dict[str, Any]) -> float:
        with torch.no_grad():
            outputs = [
                model(**{**inputs, "input_ids": ids}, use_cache=False).logits for ids in (changed, batch["input_ids"])
            ]
        return (outputs[0] - outputs[1])[:, -1].abs().max().item()

    assert influence(batch) > 1e-4
    without_mask = {name: value for name, value in batch.items() if name != "attention_mask"}
    assert influence(without_mask) == 0


def recorded_positions(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[torch.Tensor]]:
    """The positions that later runs read: the student's, in training and evaluation, and the teacher's."""
    recorded: dict[str, list[torch.Tensor]] = {"student": [], "teacher": [], "evaluation": []}
    compute_loss, teacher_inputs = RecoveryTrainer.compute_loss, RecoveryTrainer._teacher_inputs

    def watch_student(self: Any, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        if "position_ids" in inputs:
            recorded["student" if model.training else "evaluation"].append(inputs["position_ids"])
        return compute_loss(self, model, inputs, *args, **kwargs)

    def watch_teacher(self: Any, inputs: Any) -> Any:
        batch = teacher_inputs(self, inputs)
        recorded["teacher"].append(batch["position_ids"])
        return batch

    monkeypatch.setattr(RecoveryTrainer, "compute_loss", watch_student)
    monkeypatch.setattr(RecoveryTrainer, "_teacher_inputs", watch_teacher)
    return recorded


@pytest.mark.parametrize("packing", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_run_trains_on_chosen_positions_and_evaluates_on_plain_ones(
    packing: bool, stock: dict[str, Path], text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded = recorded_positions(monkeypatch)
    options = {"scheme": "alibi", "positions": "pose", "target_length": 100, "packing": packing}
    recipe = Recipe(fit_ratio=0.0, reorder_heads=False)
    evaluated = {"eval_data": str(text), "recipe": recipe}
    train(request(stock["gpt2"], text, **options, **evaluated), settings(tmp_path / "out", max_steps=3, save_steps=3))
    highest = {
        name: max(int(positions.max()) for positions in batches) for name, batches in recorded.items() if batches
    }
    assert highest.pop("student") > 2 * LENGTH
    # Rows that are not packed have no position_ids of their own.
    assert highest == {"teacher": LENGTH - 1, **({"evaluation": LENGTH - 1} if packing else {})}


@pytest.mark.slow
def test_a_resumed_run_chooses_the_same_positions(stock: dict[str, Path], text: Path, tmp_path: Path) -> None:
    options = {"scheme": "alibi", "positions": "randomized", "target_length": 100, "train_length": "16"}
    arguments = {"max_steps": 4, "per_device_train_batch_size": 64}  # more than one epoch
    directory = tmp_path / "out"
    expected = weights(train(request(stock["gpt2"], text, **options), settings(directory, **arguments)))
    shutil.rmtree(directory / "checkpoint-4")
    run = json.loads((directory / "run.json").read_text())
    (directory / "run.json").write_text(json.dumps({**run, "finished": False}))
    resumed = weights(train(request(stock["gpt2"], text, **options), settings(directory, **arguments)))
    assert all(torch.equal(resumed[name], value) for name, value in expected.items())
    changed = {**options, "target_length": 90}
    with pytest.raises(PosEncError, match="target_length"):
        train(request(stock["gpt2"], text, **changed), settings(directory, **arguments))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"positions": "pose"}, "--target-length belong together"),
        ({"target_length": 64}, "--target-length belong together"),
        ({"positions": "random", "target_length": 64}, "Unknown --positions 'random'"),
        ({"positions": "pose", "target_length": 8}, "--target-length 8 is below the 16"),
        ({"positions": "pose", "target_length": 64, "scheme": "cope"}, "cope does not read position_ids"),
        (
            {"positions": "shape", "target_length": 64, "scheme": {"type": "temperature", "form": "ssmax"}},
            "temperature does not read position_ids",
        ),
        ({"positions": "pose", "target_length": 4096, "scheme": "learned"}, "4096.*max_positions"),
        ({"positions": "pose", "target_length": 90000, "scheme": "xpos"}, "90000.*scale_base"),
    ],
)
def test_runs_that_cannot_be_honoured_are_refused(
    changes: dict[str, Any], message: str, stock: dict[str, Path], text: Path, tmp_path: Path
) -> None:
    with pytest.raises(PosEncError, match=message):
        train(request(stock["gpt2"], text, **changes), settings(tmp_path / "out"))


def test_any_trainer_can_use_the_collators(tmp_path: Path) -> None:
    from datasets import Dataset

    rows = Dataset.from_list([{**row, "labels": row["input_ids"]} for row in features(8)])
    collator = DataCollatorWithPoSE(TARGET)
    model, epochs = tiny.model("llama", dtype=torch.float32), []
    monitor = collator.set_epoch

    def set_epoch(epoch: int) -> None:
        epochs.append(epoch)
        monitor(epoch)

    collator.set_epoch = set_epoch  # type: ignore[method-assign]
    arguments = settings(tmp_path, max_steps=-1, num_train_epochs=3, save_strategy="no")
    trainer = Trainer(model, arguments, collator, rows, callbacks=[PositionEpochCallback(collator)])
    trainer.train()
    assert epochs == [0, 1, 2]
    assert np.isfinite(trainer.state.log_history[-1]["train_loss"])
