"""Progress bars that say what they show."""

from __future__ import annotations

from typing import Any

from transformers import Trainer
from transformers.trainer_callback import ProgressCallback


class LabelledProgressCallback(ProgressCallback):
    """Transformers' progress bars with a label each: "Training" and "Evaluating"."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        super().on_train_begin(args, state, control, **kwargs)
        if self.training_bar is not None:
            self.training_bar.set_description("Training")

    def on_prediction_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        super().on_prediction_step(args, state, control, **kwargs)
        if self.prediction_bar is not None:
            self.prediction_bar.set_description("Evaluating")


def label_progress_bars(trainer: Trainer) -> None:
    """Replace the progress bars of a trainer by labelled ones, unless they are off or those of a notebook."""
    if trainer.pop_callback(ProgressCallback) is not None:
        trainer.add_callback(LabelledProgressCallback())
