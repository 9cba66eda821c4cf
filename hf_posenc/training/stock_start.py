"""Start a variant from its stock model: before it is trained, as a recipe says, or in the files of a conversion."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from transformers import PreTrainedModel
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, logging

from ..checkpoints import is_scheme_parameter, load_model, read_config, read_sequences
from ..errors import PosEncError
from ..patches import architecture_of, find_auto_class, max_positions
from ..spec import PositionScheme, parse_position_scheme
from .arguments import Trainable
from .closed_form import HeadOrders, closed_form_start
from .data import sample_input_ids
from .recipes import Recipe, resolve_fit_ratio
from .warm_start import absorb_table_mean, fit

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset

logger = logging.get_logger(__name__)
CLOSED_FORM_ROWS, FIT_ROWS, FIT_ROWS_TABLE, FIT_LENGTH, MAX_FIT_STEPS = 12, 2, 4, 128, 2000
"""Small batches of short rows fit best for their cost. Removing a position table takes more rows to average over."""


def start_from_stock_model(
    stock_model: PreTrainedModel,
    model: PreTrainedModel,
    rows: Dataset | IterableDataset,
    recipe: Recipe,
    trainable: Trainable,
    length: int,
    tokens_seen: int,
) -> None:
    """Bring a variant close to its stock model before the training, in place, on some of the rows to train on.

    Weights that will not be trained are left alone. The fit gets a fraction of `tokens_seen`, the tokens that the
    training will see.
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
        head_orders = closed_form_start(stock_model, model, text, **pieces, progress=True)
    fit_tokens = math.ceil(
        resolve_fit_ratio(recipe, architecture_of(model), model.config.position_scheme) * tokens_seen
    )
    if fit_tokens:
        _fit_on_rows(stock_model, model, rows, fit_tokens, text_length, trains_all, head_orders)
    device = next(model.parameters()).device
    for parameter in model.parameters():  # the results of several processes may differ in the last bit
        parameter.data.copy_(broadcast(parameter.data.to(device)))


def suggest_options(position_scheme: PositionScheme) -> None:
    """Log the options with which a scheme recovers better, unless it has them already."""
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


@dataclasses.dataclass(frozen=True)
class ClosedFormStart:
    """A warm start for `convert_checkpoint`: `closed_form_start` on a little text, which takes no gradients.

    Attributes:
        text_file: The text; some 1,500 tokens of it are used.

    Example:
        >>> hf_posenc.convert_checkpoint(source, "t5", "out", warm_start=ClosedFormStart("text.txt"))
    """

    text_file: str | Path

    def __call__(self, source: Path, directory: Path) -> None:
        """Replace the weights of the variant in `directory`, made from the stock checkpoint in `source`."""
        config = read_config(source)
        auto_class = find_auto_class(config.architectures or [])
        if auto_class is None and config.architectures:
            raise PosEncError(
                f"A warm start would lose the head of {config.architectures[0]}, which no Auto class loads: convert "
                "without one, and call hf_posenc.training.closed_form_start on the loaded model"
            )
        input_ids = read_sequences(source, Path(self.text_file), FIT_LENGTH)[:CLOSED_FORM_ROWS]
        if len(input_ids) < 2:
            raise PosEncError(f"{self.text_file} is too short for a warm start: pass at least {2 * FIT_LENGTH} tokens")
        stock_model, _ = load_model(source, auto_class or "AutoModel", dtype=torch.float32)
        variant, _ = load_model(directory, auto_class or "AutoModel", dtype=torch.float32)
        initial = dict(stock_model.named_parameters())
        initial |= {name: weight.clone() for name, weight in variant.named_parameters() if is_scheme_parameter(name)}
        absorb_table_mean(stock_model, variant, input_ids.shape[1])
        closed_form_start(stock_model, variant, input_ids, progress=True)
        if all(torch.equal(initial[name], weight) for name, weight in variant.named_parameters()):
            logger.warning("The warm start changed nothing: it is for schemes that add biases in place of a rotation")
            return
        for path in [*directory.glob("*.safetensors"), directory / SAFE_WEIGHTS_INDEX_NAME]:
            path.unlink(missing_ok=True)  # files may be hard links to the source, so they must not be overwritten
        variant.to(read_config(directory).dtype or torch.float32).save_pretrained(directory)
