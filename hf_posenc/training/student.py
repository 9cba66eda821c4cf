"""The model to be trained: loaded, brought under its scheme, and warmed up by what the old encoding can still tell."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from transformers.utils import logging

from ..text_data import INPUT_IDS as IDS
from .classes import Classes
from .objective import Objective
from .parts import load
from .request import Request
from .stages import Stage

logger = logging.get_logger(__name__)
FIT_ROWS, FIT_ROWS_OF_TABLES, FIT_LENGTH, MOST_FIT_STEPS = 2, 4, 128, 2000
"""Small batches of short rows fit best for what they cost; what a table does shows only in what several rows have in
common. Beyond so many steps, little is gained."""


def student_of(
    request: Request,
    objective: Objective,
    rows: Any,
    rows_a_step: int,
    steps: int,
    stages: list[Stage],
    fresh: bool,
    classes: Classes | None,
    device: torch.device,
) -> Any:
    """Warmed up, unless there is a checkpoint to go on from, which has been, or nothing of the old encoding is left."""
    return _loaded(request, objective, classes)


def _loaded(request: Request, objective: Objective, classes: Classes | None) -> Any:
    """In float32, whatever the files are in: what an optimizer adds at a time is lost in less."""
    changes = dict(classes.fields) if classes is not None else {}
    if request.scheme is not None:
        changes["position_scheme"] = request.scheme
    return load(objective.auto_class, request, dtype=torch.float32, **changes)


def some_rows(rows: Any, count: int, length: int) -> torch.Tensor | None:
    """Token ids, (rows, length), each row taken for one document. Twice as many rows are looked at, and if fewer than
    half of them are long enough, all are cut to what half of them have; None where that is no more than a token."""
    looked_at = [row[IDS][:length] for row in itertools.islice(rows, 2 * count)]
    enough = sorted(map(len, looked_at))[len(looked_at) // 2] if looked_at else 0
    found = [row[:enough] for row in looked_at if len(row) >= enough]
    return torch.tensor(found[:count]) if enough > 1 else None


def _same_everywhere(model: Any) -> None:
    """What the first process has fitted, for all: they may differ in the last bit."""
    if torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
        for parameter in model.parameters():
            torch.distributed.broadcast(parameter.data, 0)
