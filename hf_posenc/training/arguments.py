"""What a training run is asked to do, and its record in the output directory, which protects it on resuming."""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
from pathlib import Path
from typing import Any, Literal, get_args

from transformers import TrainingArguments
from transformers.integrations import get_reporting_integration_callbacks

from ..checkpoints import COMPANION_FILES, LENGTH_CURVE_FILE, RECOVERY_FILE, RUN_STATE_FILE, list_checkpoints
from ..errors import PosEncError
from ..spec import PositionScheme
from .checkpointing import STAGING_DIRECTORY
from .recipe import RECOMMENDED, Recipe
from .self_generated import SELF_GENERATED_FILE

Trainable = Literal["all", "positions", "lora"]
SELF_GENERATED = "self"
"""The value of `data` for text sampled from the model itself."""
RUN_FILES = (
    *("config.json", "model*.safetensors", "model.safetensors.index.json", "training_args.json"),
    *(*COMPANION_FILES, SELF_GENERATED_FILE, RECOVERY_FILE, LENGTH_CURVE_FILE),
)
"""Files that a run leaves in its output directory, and `--restart` deletes."""
RESUME_ARGUMENTS = (
    *("max_steps", "num_train_epochs", "learning_rate", "seed", "data_seed", "bf16", "fp16", "lr_scheduler_type"),
    *("warmup_steps", "lr_scheduler_kwargs", "weight_decay", "max_grad_norm", "optim", "adam_beta1", "adam_beta2"),
    *("adam_epsilon", "label_smoothing_factor"),
)
"""TrainingArguments that must not change on resuming, besides the rows per step over all devices."""


@dataclasses.dataclass(frozen=True)
class TrainRequest:
    """The arguments of a training run that transformers' `TrainingArguments` do not cover.

    Attributes:
        model: Checkpoint directory or Hub id, of a stock model or a variant.
        data: Text file, directory, glob pattern, saved dataset, Hub dataset id, or "self" for text sampled from the
            model.
        train_length: Tokens per row, as "1024"; or stages, as "512,1024" or "512:300,1024:100" (with steps).
        scheme: The new position scheme of a stock model.
        recipe: The steps of the run.
        teacher_model: Checkpoint to distill from instead of the stock model.
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
        mlm_probability: Fraction of tokens that masked models have to predict.
        self_generated_rows: Rows to sample if `data` is "self".
        revision: Branch, tag or commit of a Hub id.

    Raises:
        PosEncError: If a value is out of range.
    """

    model: str
    data: str
    train_length: str
    scheme: PositionScheme | None = None
    recipe: Recipe = RECOMMENDED
    teacher_model: str | None = None
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
    mlm_probability: float = 0.15
    self_generated_rows: int | None = None
    revision: str | None = None

    def __post_init__(self) -> None:
        if self.trainable not in get_args(Trainable):
            raise PosEncError(f"Unknown --trainable {self.trainable!r}; expected one of {get_args(Trainable)}")
        if self.lora_rank < 1:
            raise PosEncError(f"--lora-rank must be at least 1, got {self.lora_rank}")
        if not 0 < self.mlm_probability < 1:
            raise PosEncError(f"--mlm-probability must be between 0 and 1, got {self.mlm_probability}")
        if self.self_generated_rows is not None and self.self_generated_rows < 1:
            raise PosEncError(f"--self-generated-rows must be at least 1, got {self.self_generated_rows}")
        if self.position_learning_rate is not None and not 0 < self.position_learning_rate < math.inf:
            raise PosEncError(f"--position-learning-rate must be above 0, got {self.position_learning_rate}")
        if self.teacher_model is not None and not self.recipe.teacher:
            raise PosEncError("--teacher-model contradicts --no-teacher and --recipe naive: leave one of them out")


@dataclasses.dataclass(frozen=True)
class Stage:
    """A part of the training with rows of one length; without steps, it is the whole training."""

    length: int
    steps: int | None = None


def parse_train_length(text: str, max_steps: int) -> list[Stage]:
    """Parse `--train-length`: "1024"; "512,1024", sharing `max_steps` equally; or "512:300,1024:100"."""
    stages = []
    for item in text.split(","):
        length, _, steps = item.partition(":")
        try:
            stages.append(Stage(int(length), int(steps) if steps else None))
        except ValueError:
            raise PosEncError(
                f"--train-length must look like 1024, 512,1024 or 512:300,1024:100; got {text!r}"
            ) from None
    if any(stage.length < 2 or (stage.steps is not None and stage.steps < 1) for stage in stages):
        raise PosEncError(f"--train-length needs at least 2 tokens and 1 step per stage, got {text!r}")
    with_steps = [stage for stage in stages if stage.steps is not None]
    if len(stages) == 1 and not with_steps:
        return stages
    if len(with_steps) == len(stages):
        total = sum(stage.steps or 0 for stage in stages)
        if max_steps > 0 and total != max_steps:
            raise PosEncError(f"The stages of --train-length have {total} steps, but --max-steps is {max_steps}")
        return stages
    if with_steps or max_steps < len(stages):
        raise PosEncError("Several lengths need --max-steps, or steps for each of them, as in 512:300,1024:100")
    share, rest = divmod(max_steps, len(stages))
    return [Stage(stage.length, share) for stage in stages[:-1]] + [Stage(stages[-1].length, share + rest)]


def rows_per_step(arguments: TrainingArguments) -> int:
    """Rows per optimizer step, over all devices."""
    return arguments.train_batch_size * arguments.gradient_accumulation_steps * arguments.world_size


def check_report_to(arguments: TrainingArguments) -> None:
    """Raise PosEncError if a logging integration of `--report-to` is unknown or not installed."""
    names = arguments.report_to if isinstance(arguments.report_to, list) else [arguments.report_to]
    for name in names:
        try:
            for callback in get_reporting_integration_callbacks([name] if name else []):
                if isinstance(callback, type):
                    callback()
        except (RuntimeError, ImportError, AssertionError) as error:
            raise PosEncError(f"--report-to {name} is not available: pip install {name}. {error}") from None


class RunState:
    """The record of a run in run.json: its arguments, a fingerprint of its data, and whether it has finished."""

    def __init__(self, directory: Path, request: TrainRequest, arguments: TrainingArguments, restart: bool) -> None:
        """Raises PosEncError if the directory holds something else, a different run, or a finished one."""
        self.path = directory / RUN_STATE_FILE
        recorded = {name: getattr(arguments, name) for name in RESUME_ARGUMENTS}
        self.values: dict[str, Any] = {
            "request": json.loads(json.dumps(dataclasses.asdict(request))),
            "arguments": json.loads(json.dumps(recorded, default=str)) | {"rows_per_step": rows_per_step(arguments)},
            "finished": False,
        }
        if not self.path.is_file():
            if list_checkpoints(directory) or (directory / "config.json").exists():
                raise PosEncError(f"{directory} is not empty and holds no training run: choose another --output-dir")
        elif not restart:
            self._check(self._read())

    def _read(self) -> dict[str, Any]:
        try:
            values = json.loads(self.path.read_text(encoding="utf-8"))
            if not isinstance(values, dict):
                raise ValueError("not a JSON object")
            return values
        except (ValueError, RecursionError) as error:
            raise PosEncError(
                f"Cannot read {self.path} ({error}): choose another --output-dir, or start over with --restart"
            ) from None

    def _check(self, previous: dict[str, Any]) -> None:
        if "dataset" not in previous and not previous.get("finished"):
            return  # it never started to train
        for section in ("request", "arguments", "dataset"):
            before, now = previous.get(section, {}), self.values.get(section, {})
            changed = [key for key in sorted({*before, *now}) if before.get(key) != now.get(key)] if now else []
            if changed:
                changes = "; ".join(f"{key} was {before.get(key)!r} and is now {now.get(key)!r}" for key in changed)
                raise PosEncError(
                    f"{self.path.parent} holds a different run: {changes}. Rerun with the same arguments to resume it, "
                    "choose another --output-dir, or start over with --restart"
                )
        if previous.get("finished"):
            raise PosEncError(
                f"{self.path.parent} holds a finished run: load it with from_pretrained, choose another --output-dir, "
                "or start over with --restart"
            )
        self.values = {**previous, **self.values}

    def set_dataset(self, fingerprint: dict[str, Any]) -> None:
        """Record the fingerprint of the rows. Raises PosEncError if they have changed since the run was started."""
        previous, self.values["dataset"] = dict(self.values), fingerprint
        if "dataset" in previous:
            self._check({**previous, "finished": False})

    def save(self, **values: Any) -> None:
        """Write run.json, with further values."""
        self.values |= {"finished": False, **values}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        temporary = self.path.with_suffix(".new")
        temporary.write_text(json.dumps(self.values, indent=1), encoding="utf-8")
        temporary.replace(self.path)

    def clear(self) -> None:
        """Delete everything that the run has written but run.json, which marks the directory as a run's."""
        directory = self.path.parent
        self.save()
        for path in {path for pattern in RUN_FILES for path in directory.glob(pattern) if path.is_file()}:
            path.unlink()
        for checkpoint in (*list_checkpoints(directory), directory / STAGING_DIRECTORY):
            shutil.rmtree(checkpoint, ignore_errors=True)
