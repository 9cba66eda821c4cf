"""What a training run is asked to do: the request and the stages of its training."""

from __future__ import annotations

import dataclasses
import math
import re
from typing import Literal, NamedTuple, get_args

from transformers import TrainingArguments

from ..errors import PosEncError
from ..spec import PositionScheme
from ..validation import MAX_INTEGER, MAX_SIZES, truncate_repr
from .position_collators import PositionSampling
from .recipes import RECOMMENDED, Recipe

Trainable = Literal["all", "positions", "lora"]
MAX_DIGITS = 100
SELF_GENERATED = "self"
"""The value of `data` for text sampled from the model itself."""
MAX_LENGTH = MAX_SIZES["max_position_embeddings"]
LIMITS = {
    "lora_rank": MAX_SIZES["hidden_size"],
    "target_length": MAX_LENGTH,
    "self_generated_rows": MAX_INTEGER,
    "self_eval_rows": MAX_INTEGER,
}
"""The largest values of integers in a request."""


@dataclasses.dataclass(frozen=True)
class TrainRequest:
    """The arguments of a training run that transformers' `TrainingArguments` do not cover.

    Attributes:
        model: Checkpoint directory or Hub id, of a stock model or a variant.
        data: Text file, directory, glob pattern, saved dataset, Hub dataset id, or "self" for text sampled from the
            model.
        train_length: Tokens per row, as "1024"; or stages, as "512,1024" or "512:300,1024:100" (with steps).
        scheme: The new position scheme of a stock model; by default that of the recipe, if it has one.
        tokens: How many tokens of the data to use; all if None. See `budget_arguments`.
        recipe: The steps of the run.
        teacher_model: Checkpoint to distill from instead of the stock model.
        cache_teacher: Keep the teacher's predictions on disk, so that it runs in the first pass over the rows only. The
            hidden-state loss then ends with that pass.
        task: One of the values of `Objective`; inferred from the checkpoint's head if None.
        trainable: What to train: "all", "positions" (the scheme's parameters) or "lora" (those and adapters).
        lora_rank: Rank of the adapters.
        position_learning_rate: Learning rate of the scheme's parameters; by default a multiple set by the recipe.
        eval_data: Text to evaluate on, as for `data`.
        split: Split of `data`.
        eval_split: Split of `eval_data`.
        text_column: Column with the text.
        label_column: Column with the labels of a classification task.
        streaming: Stream the data instead of loading it.
        packing: Pack several documents into a row; by default for causal models.
        positions: Train on positions that jump: "pose", "randomized" or "shape"; see `position_collators`.
        target_length: The length that `positions` are chosen for.
        mlm_probability: Fraction of tokens that masked models have to predict.
        self_generated_rows: Rows to sample if `data` is "self".
        self_eval_rows: Rows of text sampled from the stock model to evaluate on, besides `eval_data`; 0 for none. By
            default 8 if there is `eval_data`, and the model is causal and not a variant.
        max_length: The longest input that the variant's files name, where other tools cut inputs; by default the
            longer one of the stock model's length and that of the training rows.
        revision: Branch, tag or commit of a Hub id.

    Raises:
        PosEncError: If a value is out of range.
    """

    model: str
    data: str
    train_length: str
    scheme: PositionScheme | None = None
    tokens: int | None = None
    recipe: Recipe = RECOMMENDED
    teacher_model: str | None = None
    cache_teacher: bool = False
    task: str | None = None
    trainable: Trainable = "all"
    lora_rank: int = 16
    position_learning_rate: float | None = None
    eval_data: str | None = None
    split: str = "train"
    eval_split: str = "validation"
    text_column: str | None = None
    label_column: str = "label"
    streaming: bool = False
    packing: bool | None = None
    positions: PositionSampling | None = None
    target_length: int | None = None
    mlm_probability: float = 0.15
    self_generated_rows: int | None = None
    self_eval_rows: int | None = None
    max_length: int | None = None
    revision: str | None = None

    def __post_init__(self) -> None:
        if self.scheme is None:
            object.__setattr__(self, "scheme", self.recipe.scheme)
        if self.trainable not in get_args(Trainable):
            raise PosEncError(f"Unknown --trainable {self.trainable!r}; expected one of {get_args(Trainable)}")
        if self.tokens is not None and self.tokens < 1:
            raise PosEncError(f"--tokens must be at least 1, got {self.tokens}")
        if self.self_eval_rows is not None and self.self_eval_rows < 0:
            raise PosEncError(f"--self-eval-rows must be at least 0, got {self.self_eval_rows}")
        if self.positions is not None and self.positions not in get_args(PositionSampling):
            raise PosEncError(f"Unknown --positions {self.positions!r}; expected one of {get_args(PositionSampling)}")
        for name, limit in LIMITS.items():
            if (getattr(self, name) or 0) > limit:
                given = truncate_repr(getattr(self, name))
                raise PosEncError(f"--{name.replace('_', '-')} must be at most {limit:,}, got {given}")
        if (self.positions is None) != (self.target_length is None):
            raise PosEncError("--positions and --target-length belong together: pass both, or neither")
        if not 0 < self.mlm_probability < 1:
            raise PosEncError(f"--mlm-probability must be between 0 and 1, got {self.mlm_probability}")
        if self.position_learning_rate is not None and not 0 < self.position_learning_rate < math.inf:
            raise PosEncError(f"--position-learning-rate must be above 0, got {self.position_learning_rate}")
        if self.cache_teacher and not self.recipe.teacher:
            raise PosEncError("--cache-teacher needs a teacher: leave out --no-teacher and --recipe naive")
        if self.teacher_model is not None and not self.recipe.teacher:
            raise PosEncError("--teacher-model contradicts --no-teacher and --recipe naive: leave one of them out")


class Stage(NamedTuple):
    """A part of the training with rows of one length; without steps, it is the whole training."""

    length: int
    steps: int | None = None


def parse_train_length(text: str, max_steps: int) -> list[Stage]:
    """Parse `--train-length`: "1024"; "512,1024", sharing `max_steps` equally; or "512:300,1024:100"."""
    items = text.split(",")
    if not all(re.fullmatch(r"[0-9]+(:[0-9]+)?", item) for item in items):
        raise PosEncError(
            f"--train-length must look like 1024, 512,1024 or 512:300,1024:100; got {truncate_repr(text)}"
        )
    # Longer numbers are cut, because Python refuses to read thousands of digits.
    stages = [Stage(*(int(number[:MAX_DIGITS]) for number in item.split(":"))) for item in items]
    if any(stage.length > MAX_LENGTH or (stage.steps or 0) > MAX_INTEGER for stage in stages):
        raise PosEncError(
            f"--train-length must be at most {MAX_LENGTH:,} tokens, with at most {MAX_INTEGER:,} steps; got "
            f"{truncate_repr(text)}"
        )
    if any(stage.length < 2 or stage.steps == 0 for stage in stages):
        raise PosEncError(f"--train-length needs at least 2 tokens and 1 step per stage, got {text!r}")
    steps = [stage.steps for stage in stages if stage.steps is not None]
    if len(steps) == len(stages) and 0 < max_steps != sum(steps):
        raise PosEncError(f"The stages of --train-length have {sum(steps)} steps, but --max-steps is {max_steps}")
    if len(steps) == len(stages) or len(stages) == 1:
        return stages
    if steps or max_steps < len(stages):
        raise PosEncError("Several lengths need --max-steps, or steps for each of them, as in 512:300,1024:100")
    share, rest = divmod(max_steps, len(stages))
    return [Stage(stage.length, share) for stage in stages[:-1]] + [Stage(stages[-1].length, share + rest)]


def rows_per_step(arguments: TrainingArguments) -> int:
    """Rows per optimizer step, over all devices."""
    return arguments.train_batch_size * arguments.gradient_accumulation_steps * arguments.world_size
