"""TrainingArguments that no run can have, or that a run cannot honor: each is refused, with what to do instead."""

from __future__ import annotations

import dataclasses
import math

from transformers import TrainingArguments

from ..errors import PosEncError
from .arguments import Stage, TrainRequest

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


def check_numbers(arguments: TrainingArguments) -> None:
    """Refuse numbers that no training can have. Raises PosEncError with the name of the option."""
    for name in POSITIVE_ARGUMENTS:
        value = getattr(arguments, name, None)
        if value is not None and not 0 < value < math.inf:
            raise PosEncError(f"--{name.replace('_', '-')} must be above 0, got {value!r}")
    if arguments.max_steps <= 0 and not 0 < arguments.num_train_epochs < math.inf:
        raise PosEncError(f"--num-train-epochs must be above 0, got {arguments.num_train_epochs!r}")
    if not 0 <= arguments.learning_rate < math.inf:
        raise PosEncError(f"--learning-rate must be a number that is at least 0, got {arguments.learning_rate!r}")


def check_training_arguments(request: TrainRequest, arguments: TrainingArguments, stages: list[Stage]) -> None:
    """Refuse training arguments that would be ignored.

    Args:
        request: The request of the run.
        arguments: transformers' training arguments.
        stages: The stages of the training.

    Raises:
        PosEncError: If an argument has no effect in this run.
    """
    for name, way_out in WITHOUT_EFFECT.items():
        if _is_set(arguments, name):
            raise _no_effect(name, way_out)
    for name in EVALUATION_FIELDS if request.eval_data is None else ():
        if _is_set(arguments, name):
            raise _no_effect(name, "there is nothing to evaluate on: pass --eval-data")
    strategy = getattr(arguments, "train_sampling_strategy", None)
    if len(stages) > 1 and strategy != "sequential" and _is_set(arguments, "train_sampling_strategy"):
        raise _no_effect("train_sampling_strategy", "rows are shuffled within each stage: leave it out")
    if request.recipe.teacher and _is_set(arguments, "average_tokens_across_devices"):
        raise _no_effect("average_tokens_across_devices", "the distillation loss always does: leave it out")


def check_hub_arguments(arguments: TrainingArguments) -> None:
    """Refuse arguments about the Hub that would be ignored on the command line.

    Args:
        arguments: transformers' training arguments.

    Raises:
        PosEncError: If an argument has no effect.
    """
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
