"""The `handover` of a `position_scheme`: how the encoding a checkpoint was trained with gives way to the new one.

It stands in an item and holds for the whole `position_scheme`. `step` says how far it has come, so that a checkpoint
saved on the way computes what the model did when it was saved.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from typing import Any, Literal, get_args

from .limits import LARGEST_NUMBER, shown

Shape = Literal["linear", "cosine"]
KEY = "handover"
KEYS = ("from", "steps", "shape", "step")


@dataclasses.dataclass(frozen=True)
class Schedule:
    """Over so many training steps, and how far it has come."""

    steps: int
    shape: Shape = "linear"
    step: int = 0

    @property
    def share(self) -> float:
        """Of the new encoding: 0 at the start, 1 at the end. The old one has the rest."""
        done = min(self.step / self.steps, 1.0)
        return done if self.shape == "linear" else 0.5 - 0.5 * math.cos(math.pi * done)

    @property
    def is_over(self) -> bool:
        return self.step >= self.steps


def read_schedule(value: Any) -> Schedule:
    """Read the value of `handover`; whatever is wrong is a ValueError."""
    if not isinstance(value, dict):
        raise ValueError(f'handover is a dict such as {{"from": "stock", "steps": 1000}}, got {shown(value)}')
    for key in value:
        if key not in KEYS:
            raise ValueError(f"handover: unknown option {shown(key)}; it takes {list(KEYS)}")
    if value.get("from", "stock") != "stock":
        raise ValueError(
            f'handover: from is "stock", the encoding that the architecture itself has; got {shown(value["from"])}'
        )
    if value.get("shape", "linear") not in get_args(Shape):
        raise ValueError(f"handover: shape is one of {list(get_args(Shape))}, got {shown(value['shape'])}")
    if "steps" not in value:
        raise ValueError("handover needs steps: the number of training steps over which the old encoding gives way")
    for key, least in (("steps", 1), ("step", 0)):
        number = value.get(key, least)
        if not isinstance(number, int) or isinstance(number, bool) or number < least:
            raise ValueError(f"handover: {key} must be a whole number of at least {least}, got {shown(number)}")
        if number > LARGEST_NUMBER:
            raise ValueError(f"handover: {key} must be at most {LARGEST_NUMBER:,}, got {shown(number)}")
    return Schedule(value["steps"], value.get("shape", "linear"), value.get("step", 0))


def at_step(position_scheme: Any, step: int | None) -> Any:
    """A copy of a `position_scheme` whose handover has come to a step; None: without any handover."""
    if isinstance(position_scheme, (list, tuple)):
        return [at_step(item, step) for item in position_scheme]
    item = copy.deepcopy(position_scheme)
    if isinstance(item, dict) and KEY in item:
        if step is None:
            del item[KEY]
        else:
            item[KEY]["step"] = step
    return item


def progress_of(schedule: Schedule) -> list[int]:
    """What is kept with the weights, so that whoever loads them comes to the same step."""
    return [schedule.step, schedule.steps]


def with_handover(position_scheme: Any, steps: int, shape: Shape = "linear") -> Any:
    """A copy of a `position_scheme` that is handed over to, from what the architecture itself has."""
    handover = {"from": "stock", "steps": steps, "shape": shape}
    if isinstance(position_scheme, (list, tuple)):
        return [*map(copy.deepcopy, position_scheme[:-1]), with_handover(position_scheme[-1], steps, shape)]
    item = {"type": position_scheme} if isinstance(position_scheme, str) else dict(position_scheme)
    return {**item, KEY: handover}
