"""Handing over: the encoding that a checkpoint was trained with gives way to the new one while the model trains."""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import nn
from transformers import TrainerCallback

from .grammar import parse, schedule_of
from .patches.handing import bases_of, go_to, schedule_in, take_in_hand
from .patches.live import retrofit
from .schedule import Schedule, Shape, with_handover

STATE = "hf_posenc.Handover"
"""What the step is kept under in a Trainer's state."""


def _refuse_twice(steps: int | None, shape: Shape, who: str) -> None:
    if steps is not None or shape != "linear":
        raise ValueError(f"{who} names its handover: change steps and shape there, and leave them out here")


class Handover(TrainerCallback):
    """Moves the handover of a model along: as a Trainer's callback, or by `step()` in a loop of your own.

    The model names its handover in its scheme, `{"type": ..., "handover": {"from": "stock", "steps": 1000}}`; or it
    is a stock model, which `position_scheme` and `steps` change in place.

        handover = hf_posenc.Handover(model)
        trainer = Trainer(model, ..., callbacks=[handover])     # or, in a loop: optimizer.step(); handover.step()

    Make it before the optimizer, and before DDP or accelerate's `prepare`: what gives way is not trained. Call `step()`
    once for each step of the optimizer, so with gradient accumulation only where `accelerator.sync_gradients`. How far
    it has come is kept with the model's weights, and comes back with them.
    """

    def __init__(
        self, model: nn.Module, position_scheme: Any = None, steps: int | None = None, shape: Shape = "linear"
    ) -> None:
        self.model = model
        if position_scheme is not None:
            if schedule_of(parse(position_scheme)) is not None:
                _refuse_twice(steps, shape, "the position_scheme")
            elif steps is None:
                raise ValueError("Handover needs steps: over how many training steps the old encoding gives way")
            else:
                position_scheme = with_handover(position_scheme, steps, shape)
            retrofit(model, position_scheme)
        else:
            _refuse_twice(steps, shape, "the model")
        schedule = schedule_in(model)
        if schedule is None:
            raise ValueError(
                "the model hands nothing over: load it with a position_scheme that says so, such as "
                '{"type": "alibi", "handover": {"from": "stock", "steps": 1000}}, or pass position_scheme and steps'
            )
        self.schedule: Schedule = schedule
        self._ahead = 0
        take_in_hand(model)

    @property
    def share(self) -> float:
        """Of the new encoding, 0 to 1."""
        return self.schedule.share

    @property
    def is_over(self) -> bool:
        return self.schedule.is_over

    def step(self) -> None:
        """One training step has been made. Call it after the optimizer's."""
        self._look()
        self.go_to(self.schedule.step + 1)

    def go_to(self, step: int) -> None:
        """Bring the model to a step of the handover."""
        if step < 0:
            raise ValueError(f"a handover begins at step 0, and there is no step {step}")
        self._look()
        if self.is_over and step < self.schedule.steps:
            raise ValueError(
                "the handover is over and the old encoding gone: to go on from an earlier step, load that checkpoint"
            )
        self.schedule = dataclasses.replace(self.schedule, step=step)
        go_to(self.model, step)

    def finish(self) -> None:
        """Come to the end at once: what is left is the new encoding alone."""
        self.go_to(max(self.schedule.steps, self.schedule.step))

    def _look(self) -> None:
        """Weights that were loaded meanwhile have brought the model to the step that they are from."""
        found = schedule_in(self.model)
        self.schedule = found or dataclasses.replace(self.schedule, step=max(self.schedule.steps, self.schedule.step))

    def state_dict(self) -> dict[str, Any]:
        """For `accelerator.register_for_checkpointing`, though weights tell the step too."""
        return dataclasses.asdict(self.schedule)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if (state["steps"], state["shape"]) != (self.schedule.steps, self.schedule.shape):
            raise ValueError(f"this is the state of another handover: {state}, and here it is {self.schedule}")
        self.go_to(state["step"])

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if model is not None and not set(map(id, bases_of(self.model))) <= set(map(id, bases_of(model))):
            raise ValueError("the Trainer trains another model than the one that this Handover was made with")
        self._look()
        kept = state.stateful_callbacks.get(STATE)
        if kept is not None:  # a run that is resumed, whose weights need not tell that it is over
            self.load_state_dict(kept)
        # One that begins with a model saved on the way is ahead of the Trainer's steps.
        self._ahead = max(self.schedule.step - state.global_step, 0)
        self.go_to(self._ahead + state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.go_to(self._ahead + state.global_step)
        state.stateful_callbacks[STATE] = self.state_dict()  # goes into trainer_state.json
