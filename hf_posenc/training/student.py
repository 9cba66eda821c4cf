"""The model to be trained: loaded, brought under its scheme, and warmed up by what the old encoding can still tell."""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch
from transformers.utils import logging

from ..grammar import parse, schedule_of
from ..handover import Handover
from ..patches.attach import NothingToHandOver
from ..schedule import with_handover
from .centring import centre_tables
from .classes import Classes
from .fitting import fit
from .objective import Objective
from .parts import load
from .recipe import share_to_fit
from .request import Request
from .stages import Stage
from .teacher import architecture_of
from .texts import IDS

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
    recipe = request.recipe
    own = schedule_of(parse(request.scheme)) if request.scheme is not None else None
    handover_steps = math.ceil(recipe.handover * steps) if recipe.handover else None
    begins = request.scheme is not None and fresh and (own is None or own.step == 0)
    warms = begins and (recipe.centre or recipe.fit != 0)
    try:
        model = _loaded(request, objective, handover_steps or (1 if warms else None), classes)
    except NothingToHandOver:
        if handover_steps or own is not None:
            raise
        model, warms = _loaded(request, objective, None, classes), False
    if warms:
        model.to(device)
        if recipe.centre and request.trained == "all":
            centre_tables(model, min(stages[0].length, model.config.max_position_embeddings))
        share = share_to_fit(recipe, architecture_of(model), request.scheme)
        at_once = handover_steps is None and own is None
        if share and objective is not Objective.CLASSIFICATION:
            # On the way, queries and keys serve both encodings.
            projections = request.trained == "all" and at_once
            tokens = math.ceil(share * steps * rows_a_step * stages[0].length)
            _fit(model, rows, tokens, stages[0].length, projections)
        if at_once:
            Handover(model).finish()
    return model


def _loaded(request: Request, objective: Objective, handover_steps: int | None, classes: Classes | None) -> Any:
    """In float32, whatever the files are in: what an optimizer adds at a time is lost in less."""
    changes = dict(classes.fields) if classes is not None else {}
    if request.scheme is not None:
        scheme = request.scheme
        if handover_steps is not None and schedule_of(parse(scheme)) is None:
            scheme = with_handover(scheme, handover_steps)
        changes["position_scheme"] = scheme
    return load(objective.auto_class, request, dtype=torch.float32, **changes)


def _fit(model: Any, rows: Any, tokens: int, length: int, projections: bool) -> None:
    """On so many tokens, or as many as are worth it."""
    length = min(length, FIT_LENGTH, model.config.max_position_embeddings)
    rows_at_once = FIT_ROWS if architecture_of(model).rotary else FIT_ROWS_OF_TABLES
    number = min(math.ceil(tokens / (rows_at_once * length)), MOST_FIT_STEPS)
    ids = some_rows(rows, number * rows_at_once, length)
    if ids is None or len(ids) < rows_at_once:
        logger.warning("the rows are too short or too few to fit attention on: it is not, before the training")
        return
    found = fit(model, ids, projections=projections, steps=number, rows=rows_at_once, progress=True)
    logger.info(f"attention fitted: {found.before:.4f} to {found.after:.4f} nats from that of the old encoding")
    _same_everywhere(model)


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
