"""Progress bars of a `Trainer` that say what they show."""

from __future__ import annotations

from typing import Any

from tqdm.auto import tqdm
from transformers import ProgressCallback, Trainer
from transformers.trainer_utils import has_length


class LabelledProgressCallback(ProgressCallback):
    """Transformers' progress bars with a label each, from the first frame on: "Training" and "Evaluating"."""

    training_bar: tqdm | None
    prediction_bar: tqdm | None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            self.training_bar = tqdm(total=state.max_steps, desc="Training", dynamic_ncols=True)
        self.current_step = 0

    def on_prediction_step(
        self, args: Any, state: Any, control: Any, eval_dataloader: Any = None, **kwargs: Any
    ) -> None:
        if state.is_world_process_zero and self.prediction_bar is None and has_length(eval_dataloader):
            leave = self.training_bar is None
            self.prediction_bar = tqdm(total=len(eval_dataloader), desc="Evaluating", leave=leave, dynamic_ncols=True)
        super().on_prediction_step(args, state, control, eval_dataloader=eval_dataloader, **kwargs)


def label_progress_bars(trainer: Trainer) -> None:
    """Replace the progress bars of a trainer by labelled ones, unless they are off or those of a notebook."""
    if trainer.pop_callback(ProgressCallback) is not None:
        trainer.add_callback(LabelledProgressCallback())
