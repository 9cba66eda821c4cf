"""Build the model to train: load it with its new scheme, then give it a warm start from the stock model."""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.utils import logging

from ..text_data import INPUT_IDS as IDS
from .classes import Classes
from .fit import absorb_table_mean, architecture_of, fit
from .objective import Objective
from .parts import load
from .recipe import share_to_fit
from .request import Request
from .stages import Stage

logger = logging.get_logger(__name__)
FIT_ROWS, FIT_ROWS_TABLE, FIT_LENGTH, MAX_FIT_STEPS = 2, 4, 128, 2000
"""Small batches of short rows fit best for their cost; a position table needs more rows to average over."""


def build_student(
    request: Request,
    objective: Objective,
    stock_model: PreTrainedModel | None,
    rows: Any,
    rows_per_step: int,
    steps: int,
    stages: list[Stage],
    resumes: bool,
    classes: Classes | None,
    device: torch.device,
) -> Any:
    """The model to train. A resumed run needs no warm start: its checkpoint has had one."""
    # In float32 whatever the files are in: in half precision, small optimizer updates round to nothing.
    changes = dict(classes.fields) if classes is not None else {}
    if request.scheme is None:
        return load(objective.auto_class, request, dtype=torch.float32, **changes)
    scheme = request.scheme
    model = load(objective.auto_class, request, dtype=torch.float32, position_scheme=scheme, **changes)
    recipe = request.recipe
    share = share_to_fit(recipe, architecture_of(model), scheme) if objective is not Objective.CLASSIFICATION else 0.0
    absorbs = recipe.centre and request.trained == "all"
    if resumes or not (share or absorbs):
        return model
    if stock_model is None:
        stock_model = load(objective.auto_class, request, **changes)
    model.to(device)
    if absorbs:
        absorb_table_mean(stock_model, model, min(stages[0].length, model.config.max_position_embeddings))
    if share:
        tokens = math.ceil(share * steps * rows_per_step * stages[0].length)
        _fit(stock_model, model, rows, tokens, stages[0].length, projections=request.trained == "all")
    return model


def _fit(stock_model: PreTrainedModel, model: Any, rows: Any, tokens: int, length: int, projections: bool) -> None:
    length = min(length, FIT_LENGTH, model.config.max_position_embeddings)
    rows_per_step = FIT_ROWS if architecture_of(model).rotary else FIT_ROWS_TABLE
    steps = min(math.ceil(tokens / (rows_per_step * length)), MAX_FIT_STEPS)
    input_ids = some_rows(rows, steps * rows_per_step, length)
    if input_ids is None or len(input_ids) < rows_per_step:
        logger.warning("Skipping the attention fit: the training rows are too short or too few")
        return
    result = fit(stock_model, model, input_ids, projections=projections, steps=steps, rows=rows_per_step, progress=True)
    logger.info(f"Attention fit: {result.before:.4f} -> {result.after:.4f} nats from the stock attention")
    _broadcast_parameters(model)


def some_rows(rows: Any, count: int, length: int) -> torch.Tensor | None:
    """Token ids, (rows, length), each row taken for one document. Twice as many rows are looked at, and if fewer than
    half of them are long enough, all are cut to what half of them have; None where that is no more than a token."""
    looked_at = [row[IDS][:length] for row in itertools.islice(rows, 2 * count)]
    enough = sorted(map(len, looked_at))[len(looked_at) // 2] if looked_at else 0
    found = [row[:enough] for row in looked_at if len(row) >= enough]
    return torch.tensor(found[:count]) if enough > 1 else None


def _broadcast_parameters(model: Any) -> None:
    """Every process fits; the results may differ in the last bit, so the first one's are used."""
    if torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
        for parameter in model.parameters():
            torch.distributed.broadcast(parameter.data, 0)
