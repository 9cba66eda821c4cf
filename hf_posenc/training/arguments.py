"""What a training run is asked to do: the request, its recipe, and the stages of its training."""

from __future__ import annotations

import dataclasses
import math
import re
from typing import Literal, NamedTuple, get_args

from transformers import TrainingArguments

from ..errors import PosEncError
from ..patches import Architecture
from ..schemes import Kind
from ..spec import PositionScheme, parse_position_scheme
from .distillation import LossWeights
from .position_collators import PositionSampling

Trainable = Literal["all", "positions", "lora"]
SELF_GENERATED = "self"
"""The value of `data` for text sampled from the model itself."""
DEFAULT_FIT_RATIO = 0.1


@dataclasses.dataclass(frozen=True)
class Recipe:
    """The steps of a training run, in order.

    Attributes:
        absorb_table_mean: Keep the mean of a dropped position table, in architectures with an embedding to hold it.
        reorder_heads: Give each bias the head that suits it best, see `closed_form_start`.
        fold_rotation: Keep the mean of a dropped rotation, in the query weights.
        match_biases: Start biases by distance from how much the stock model attends to each distance.
        fit_ratio: Tokens to fit attention on before training, as a fraction of the training tokens. None: a tenth
            where fitting helps, see `resolve_fit_ratio`.
        teacher: Distill from the stock model instead of learning from the text alone.
        loss_weights: Weights of the terms of the distillation loss.
        hidden_loss_until: Fraction of the training over which the hidden-state loss fades to zero. Hidden states
            speed up the start, but a model with a new encoding need not reproduce them to the end.
        position_lr_multiplier: Learning rate of the scheme's parameters, relative to all others. They start
            untrained, and most are biases that need larger steps than weights inside matrix products.
        scheme: The new position scheme of a stock model if the request names none.

    Raises:
        PosEncError: If a value is out of range.
    """

    absorb_table_mean: bool = True
    reorder_heads: bool = True
    fold_rotation: bool = True
    match_biases: bool = True
    fit_ratio: float | None = None
    teacher: bool = True
    loss_weights: LossWeights = LossWeights()
    hidden_loss_until: float = 1.0
    position_lr_multiplier: float = 20.0
    scheme: PositionScheme | None = None

    def __post_init__(self) -> None:
        if self.fit_ratio is not None and not 0 <= self.fit_ratio <= 1:
            raise PosEncError(f"fit_ratio (--fit-ratio) must be between 0 and 1, got {self.fit_ratio!r}")
        if not (self.hidden_loss_until >= 0 and self.position_lr_multiplier > 0):
            raise PosEncError(f"hidden_loss_until must be at least 0 and position_lr_multiplier above 0, got {self}")

    @property
    def starts_from_stock_model(self) -> bool:
        """Whether anything happens before the training."""
        pieces = (self.absorb_table_mean, self.reorder_heads, self.fold_rotation, self.match_biases)
        return any(pieces) or self.fit_ratio != 0


RECOMMENDED = Recipe()
NAIVE = Recipe(
    absorb_table_mean=False,
    reorder_heads=False,
    fold_rotation=False,
    match_biases=False,
    fit_ratio=0.0,
    teacher=False,
    position_lr_multiplier=1.0,
)
"""The baseline: change the encoding and fine-tune on text."""


def resolve_fit_ratio(recipe: Recipe, architecture: Architecture, scheme: PositionScheme) -> float:
    """The recipe's fit ratio, or the default where fitting helps.

    It helps to replace a rotation, which acts in attention alone. A position table acts on the whole model: a rotation
    or a content-dependent term can take over its effect on attention, but a distance bias cannot do enough of it, and
    another table has no need to.
    """
    if recipe.fit_ratio is not None:
        return recipe.fit_ratio
    kinds = {spec.scheme.kind for spec in parse_position_scheme(scheme)}
    replaces_table = bool(kinds & {Kind.ROTATION, Kind.CONTENT}) and Kind.INPUT not in kinds
    return DEFAULT_FIT_RATIO if architecture.rotary or replaces_table else 0.0


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
    max_length: int | None = None
    revision: str | None = None

    def __post_init__(self) -> None:
        if self.scheme is None:
            object.__setattr__(self, "scheme", self.recipe.scheme)
        if self.trainable not in get_args(Trainable):
            raise PosEncError(f"Unknown --trainable {self.trainable!r}; expected one of {get_args(Trainable)}")
        if self.tokens is not None and self.tokens < 1:
            raise PosEncError(f"--tokens must be at least 1, got {self.tokens}")
        if self.positions is not None and self.positions not in get_args(PositionSampling):
            raise PosEncError(f"Unknown --positions {self.positions!r}; expected one of {get_args(PositionSampling)}")
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
        raise PosEncError(f"--train-length must look like 1024, 512,1024 or 512:300,1024:100; got {text!r}")
    stages = [Stage(*map(int, item.split(":"))) for item in items]
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


def is_sharded(arguments: TrainingArguments) -> bool:
    """Whether FSDP or DeepSpeed will shard the models, by the arguments or the config of `accelerate launch`."""
    from accelerate.utils import parse_flag_from_env

    by_launcher = any(parse_flag_from_env(f"ACCELERATE_USE_{name}") for name in ("FSDP", "DEEPSPEED"))
    return bool(by_launcher or arguments.fsdp or arguments.deepspeed)
