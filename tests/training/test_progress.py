"""Progress bars of a training say what they show."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from transformers import Trainer, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import ProgressCallback
from typer.testing import CliRunner

from hf_posenc.cli import app
from hf_posenc.training.progress import LabelledProgressCallback, label_progress_bars
from tests.support import tiny_models as tiny
from tests.support import word_level_tokenizer as word_level

STATE = TrainerState(max_steps=3, is_world_process_zero=True)


def bars(text: str) -> list[str]:
    """Every frame of every progress bar."""
    return [line for line in re.split(r"[\r\n]", text) if re.search(r"\d%\|", line)]


def unlabelled(text: str) -> list[str]:
    return [line for line in bars(text) if not re.match(r"\S.*: +\d+%\|", line)]


def test_bars_have_labels(capsys: pytest.CaptureFixture[str]) -> None:
    callback, arguments = LabelledProgressCallback(), (TrainingArguments("unused"), STATE, TrainerControl())
    callback.on_prediction_step(*arguments, eval_dataloader=[1, 2])
    callback.on_evaluate(*arguments)
    callback.on_train_begin(*arguments)
    callback.on_train_end(*arguments)
    shown = capsys.readouterr().err
    assert "Evaluating: " in shown
    assert "Training: " in shown
    assert unlabelled(shown) == []


def test_a_run_shows_no_bar_without_a_label(tmp_path: Path) -> None:
    word_level.saved("gpt2", tmp_path / "stock")
    (tmp_path / "text.txt").write_text(word_level.text(600))
    options = f"--data {tmp_path / 'text.txt'} --eval-data {tmp_path / 'text.txt'} --eval-strategy steps --eval-steps 1"
    run = f"train --model {tmp_path / 'stock'} --scheme alibi --output-dir {tmp_path / 'out'} --train-length 8"
    settings = "--max-steps 2 --per-device-train-batch-size 4 --report-to none --use-cpu --recipe naive"
    done = CliRunner().invoke(app, f"{run} {options} {settings}".split())
    assert done.exit_code == 0, done.output
    assert {"Training", "Evaluating"} <= {line.split(":")[0] for line in bars(done.stderr)}
    assert unlabelled(done.stderr) == []


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
    replaced = [type(item) for item in trainer.callback_handler.callbacks if isinstance(item, ProgressCallback)]
    assert replaced == ([] if disabled else [LabelledProgressCallback])
