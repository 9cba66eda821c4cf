"""Everything that happens to a variant between loading it and training it, as its recipe says."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING

from transformers import PreTrainedModel
from transformers.utils import logging

from ..patches import architecture_of, max_positions
from ..spec import PositionScheme, parse_position_scheme
from .arguments import Recipe, Trainable, resolve_fit_ratio
from .closed_form import HeadOrders, closed_form_start
from .data import sample_input_ids
from .warm_start import absorb_table_mean, fit

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset

logger = logging.get_logger(__name__)
CLOSED_FORM_ROWS, FIT_ROWS, FIT_ROWS_TABLE, FIT_LENGTH, MAX_FIT_STEPS = 12, 2, 4, 128, 2000
"""Small batches of short rows fit best for their cost; to remove a position table takes more rows to average over."""


def start_from_stock_model(
    stock_model: PreTrainedModel,
    model: PreTrainedModel,
    rows: Dataset | IterableDataset,
    recipe: Recipe,
    trainable: Trainable,
    length: int,
    tokens_seen: int,
) -> None:
    """Bring a variant close to its stock model before the training, in place.

    Args:
        stock_model: The model that the variant was made from.
        model: The variant.
        rows: The rows to train on, some of which are used here.
        recipe: Which steps to take.
        trainable: What will be trained. Weights that will not be are left alone.
        length: Tokens per row.
        tokens_seen: How many tokens the training will see, which the fit gets a fraction of.
    """
    from accelerate.utils import broadcast

    suggest_options(model.config.position_scheme)
    trains_all = trainable == "all"
    text_length = min(length, FIT_LENGTH, max_positions(model.config))
    if recipe.absorb_table_mean and trains_all:
        absorb_table_mean(stock_model, model, min(length, max_positions(model.config)))
    pieces = {
        "reorder_heads": recipe.reorder_heads and trains_all,
        "fold_rotation": recipe.fold_rotation and trains_all,
        "match_biases": recipe.match_biases,
    }
    head_orders = None
    text = sample_input_ids(rows, CLOSED_FORM_ROWS, text_length) if any(pieces.values()) else None
    if text is not None and len(text) > 1:
        head_orders = closed_form_start(stock_model, model, text, **pieces)
    fit_tokens = math.ceil(
        resolve_fit_ratio(recipe, architecture_of(model), model.config.position_scheme) * tokens_seen
    )
    if fit_tokens:
        _fit_on_rows(stock_model, model, rows, fit_tokens, text_length, trains_all, head_orders)
    for parameter in model.parameters():  # the results of several processes may differ in the last bit
        parameter.data.copy_(broadcast(parameter.data))


def suggest_options(position_scheme: PositionScheme) -> None:
    """Log the options with which a scheme recovers further, if it has other ones."""
    for spec in parse_position_scheme(position_scheme):
        better = {
            name: value for name, value in spec.scheme.recommended.items() if getattr(spec.options, name) != value
        }
        if better:
            scheme = json.dumps({"type": spec.name, **better})
            logger.warning(
                f"{spec.name} recovers further with parameters of its own in each layer: --scheme '{scheme}'"
            )


def _fit_on_rows(
    stock_model: PreTrainedModel,
    model: PreTrainedModel,
    rows: Dataset | IterableDataset,
    tokens: int,
    length: int,
    projections: bool,
    head_orders: HeadOrders | None,
) -> None:
    batch_size = FIT_ROWS if architecture_of(model).rotary else FIT_ROWS_TABLE
    steps = min(math.ceil(tokens / (batch_size * length)), MAX_FIT_STEPS)
    input_ids = sample_input_ids(rows, steps * batch_size, length)
    if input_ids is None or len(input_ids) < batch_size:
        logger.warning("Skipping the attention fit: the training rows are too short or too few")
        return
    result = fit(
        stock_model,
        model,
        input_ids,
        projections=projections,
        steps=steps,
        rows=batch_size,
        head_orders=head_orders,
        progress=True,
    )
    logger.info(f"Attention fit: from {result.before:.4f} to {result.after:.4f} nats per query")
