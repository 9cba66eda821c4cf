"""Progress bars of a training say what they show."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import Trainer, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import ProgressCallback

from hf_posenc.training.run import LabelledProgressCallback, label_progress_bars
from tests.support import tiny_models as tiny

STATE = TrainerState(max_steps=3, is_world_process_zero=True)


def test_bars_have_labels(capsys: pytest.CaptureFixture[str]) -> None:
    callback, arguments = LabelledProgressCallback(), (TrainingArguments("unused"), STATE, TrainerControl())
    callback.on_prediction_step(*arguments, eval_dataloader=[1, 2])
    callback.on_evaluate(*arguments)
    callback.on_train_begin(*arguments)
    callback.on_train_end(*arguments)
    shown = capsys.readouterr().err
    assert "Evaluating: " in shown
    assert "Training: " in shown


def test_the_process_that_shows_nothing_has_no_bars() -> None:
    callback, state = LabelledProgressCallback(), TrainerState(is_world_process_zero=False)
    callback.on_train_begin(TrainingArguments("unused"), state, TrainerControl())
    callback.on_prediction_step(TrainingArguments("unused"), state, TrainerControl(), eval_dataloader=[1])
    assert (callback.training_bar, callback.prediction_bar) == (None, None)


@pytest.mark.parametrize("disabled", [False, True])
def test_only_bars_that_are_shown_are_replaced(disabled: bool, tmp_path: Path) -> None:
    arguments = TrainingArguments(str(tmp_path), disable_tqdm=disabled, report_to="none", use_cpu=True)
    trainer = Trainer(tiny.model("gpt2"), arguments)
    label_progress_bars(trainer)
    bars = [type(item) for item in trainer.callback_handler.callbacks if isinstance(item, ProgressCallback)]
    assert bars == ([] if disabled else [LabelledProgressCallback])
