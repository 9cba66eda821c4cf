"""What a training run is asked to do: the request and the stages of its training.

transformers' `TrainingArguments` that a run cannot honor are refused, with what to do instead.
"""

from __future__ import annotations

import dataclasses
import math
import re
from typing import Literal, NamedTuple, get_args

from transformers import TrainingArguments

from ..errors import PosEncError
from ..spec import PositionScheme
from .position_collators import PositionSampling
from .recipes import RECOMMENDED, Recipe
from .sharding import is_sharded

Trainable = Literal["all", "positions", "lora"]
SELF_GENERATED = "self"
"""The value of `data` for text sampled from the model itself."""
POSITIVE_ARGUMENTS = (
    *("gradient_accumulation_steps", "per_device_train_batch_size", "per_device_eval_batch_size"),
    *("logging_steps", "save_steps", "eval_steps"),
)
WITHOUT_EFFECT = {
    "resume_from_checkpoint": "a run resumes from its last checkpoint by itself: rerun the same command. To train "
    "another checkpoint, pass it as --model",
    "do_predict": "training makes no predictions: run `hf-posenc eval` on the result",
    "save_only_model": "a run can only resume from a checkpoint with its optimizer: leave it out, or pass "
    "--save-strategy no to save the result only",
    "batch_eval_metrics": "the metrics of the evaluation are fixed: leave it out",
    "include_for_metrics": "the metrics of the evaluation are fixed: leave it out",
    "use_liger_kernel": "Liger's kernels replace stock models only: leave it out",
    "liger_kernel_config": "Liger's kernels replace stock models only: leave it out",
    "push_to_hub": "only the command line pushes: call hf_posenc.hub.push_directory on the result",
}
"""Fields that change nothing in any run, with the way out."""
EVALUATION_FIELDS = ("eval_strategy", "do_eval", "eval_on_start", "load_best_model_at_end")
"""Fields that need data to evaluate on. The first implies the second."""
HUB_FIELDS = ("hub_model_id", "hub_private_repo", "hub_revision")
"""Fields that need `push_to_hub`."""
HUB_STRATEGIES = ("every_save", "end")
"""The default, and what is done: the result is pushed once, at the end."""


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


def check_numbers(arguments: TrainingArguments) -> None:
    """Raise PosEncError for numbers that no training can have."""
    for name in POSITIVE_ARGUMENTS:
        value = getattr(arguments, name, None)
        if value is not None and not 0 < value < math.inf:
            raise PosEncError(f"--{name.replace('_', '-')} must be above 0, got {value!r}")
    if arguments.max_steps <= 0 and not 0 < arguments.num_train_epochs < math.inf:
        raise PosEncError(f"--num-train-epochs must be above 0, got {arguments.num_train_epochs!r}")
    if not 0 <= arguments.learning_rate < math.inf:
        raise PosEncError(f"--learning-rate must be a number that is at least 0, got {arguments.learning_rate!r}")


def check_training_arguments(request: TrainRequest, arguments: TrainingArguments, stages: list[Stage]) -> None:
    """Raise PosEncError for training arguments that have no effect in this run."""
    for name, way_out in WITHOUT_EFFECT.items():
        if _is_set(arguments, name):
            raise _no_effect(name, way_out)
    for name in EVALUATION_FIELDS if request.eval_data is None else ():
        if _is_set(arguments, name):
            raise _no_effect(name, "there is nothing to evaluate on: pass --eval-data")
    if arguments.load_best_model_at_end and is_sharded(arguments):
        raise PosEncError(
            "--load-best-model-at-end does not work with FSDP or DeepSpeed: leave it out, and load the best checkpoint "
            "from the output directory"
        )
    strategy = getattr(arguments, "train_sampling_strategy", None)
    if len(stages) > 1 and strategy != "sequential" and _is_set(arguments, "train_sampling_strategy"):
        raise _no_effect("train_sampling_strategy", "rows are shuffled within each stage: leave it out")
    if request.recipe.teacher and _is_set(arguments, "average_tokens_across_devices"):
        raise _no_effect("average_tokens_across_devices", "the distillation loss always does: leave it out")


def check_hub_arguments(arguments: TrainingArguments) -> None:
    """Raise PosEncError for arguments about the Hub that have no effect on the command line."""
    if not arguments.push_to_hub:
        for name in HUB_FIELDS:
            if _is_set(arguments, name):
                raise _no_effect(name, "nothing is pushed: pass --push-to-hub")
        return
    if str(getattr(arguments.hub_strategy, "value", arguments.hub_strategy)) not in HUB_STRATEGIES:
        raise _no_effect("hub_strategy", "the result is pushed once, at the end: leave it out")
    if arguments.hub_always_push:
        raise _no_effect("hub_always_push", "the result is pushed once, at the end: leave it out")


def _is_set(arguments: TrainingArguments, name: str) -> bool:
    """Whether an argument differs from its default; False if this release of transformers does not have it."""
    field = next((field for field in dataclasses.fields(arguments) if field.name == name), None)
    if field is None:
        return False
    factory = field.default_factory
    default = field.default if factory is dataclasses.MISSING else factory()
    return getattr(arguments, name) not in (None, default)


def _no_effect(name: str, way_out: str) -> PosEncError:
    return PosEncError(f"--{name.replace('_', '-')} has no effect here: {way_out}")
