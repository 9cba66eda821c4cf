"""Refuse transformers' `TrainingArguments` that a run cannot honor, before anything is loaded, with the way out."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint
from transformers import Trainer, TrainingArguments, get_scheduler
from transformers.training_args import ParallelMode

from ..errors import PosEncError
from ..validation import MAX_INTEGER, truncate_repr
from .arguments import Stage, TrainRequest
from .objectives import Objective
from .sharding import is_sharded

MAX_WORKERS = 1024
COUNTS = (
    *("gradient_accumulation_steps", "per_device_train_batch_size", "per_device_eval_batch_size"),
    *("eval_accumulation_steps", "dataloader_prefetch_factor"),
)
ABOVE_ZERO = ("logging_steps", "save_steps", "eval_steps", "adam_epsilon")
RANGES = {
    **dict.fromkeys(COUNTS, (1, MAX_INTEGER)),
    "dataloader_num_workers": (0, MAX_WORKERS),
    "neftune_noise_alpha": (0, MAX_INTEGER),
    **dict.fromkeys(("seed", "data_seed"), (0, 2**32 - 1)),
    **dict.fromkeys(("learning_rate", "weight_decay", "max_grad_norm", "warmup_steps", "eval_delay"), (0, math.inf)),
}
"""The smallest and the largest value of numbers, where there is no other check. None may be infinite or NaN."""
FRACTIONS = ("adam_beta1", "adam_beta2", "label_smoothing_factor")
"""Numbers that are at least 0 and below 1."""
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
STRATEGY_FIELDS = ("metric_for_best_model", "greater_is_better", "eval_delay")
"""Fields that need evaluations during the training."""
HUB_FIELDS = ("hub_model_id", "hub_private_repo", "hub_revision")
"""Fields that need `push_to_hub`."""
HUB_STRATEGIES = ("every_save", "end")
"""The default, and what is done: the result is pushed once, at the end."""
LOW_RANK_OPTIMIZERS = ("galore", "apollo")
"""What the names of optimizers for `optim_target_modules` contain."""
WITHOUT_OPTIONS = ("constant", "constant_with_warmup")
"""Schedules that ignore `lr_scheduler_kwargs`."""
CONSTRUCTION_ERRORS = (ValueError, TypeError, ImportError, AttributeError, KeyError, ArithmeticError)
"""What transformers, accelerate and torch raise for values that they cannot build anything from."""


def check_numbers(arguments: TrainingArguments) -> None:
    """Raise PosEncError for numbers that no training can have."""
    for name, (low, high) in RANGES.items():
        value = _number(arguments, name)
        if value is not None and not (low <= value <= high and value < math.inf):
            limit = f"between {low} and {high:,}" if high < math.inf else f"a number that is at least {low}"
            raise PosEncError(f"{_flag(name)} must be {limit}, got {truncate_repr(value)}")
    for name in ABOVE_ZERO:
        value = _number(arguments, name)
        if value is not None and not 0 < value < math.inf:
            raise PosEncError(f"{_flag(name)} must be above 0, got {value!r}")
    for name in FRACTIONS:
        value = _number(arguments, name)
        if value is not None and not 0 <= value < 1:
            raise PosEncError(f"{_flag(name)} must be at least 0 and below 1, got {value!r}")
    if arguments.max_steps > MAX_INTEGER:
        raise PosEncError(f"--max-steps must be at most {MAX_INTEGER:,}, got {truncate_repr(arguments.max_steps)}")
    if arguments.max_steps <= 0 and not 0 < arguments.num_train_epochs < math.inf:
        raise PosEncError(f"--num-train-epochs must be above 0, got {arguments.num_train_epochs!r}")


def check_training_arguments(request: TrainRequest, arguments: TrainingArguments, stages: list[Stage]) -> None:
    """Raise PosEncError for training arguments that have no effect in this run, or that nothing can be built from."""
    for name, way_out in WITHOUT_EFFECT.items():
        if _is_set(arguments, name):
            raise _no_effect(name, way_out)
    _check_evaluation(request, arguments)
    strategy = getattr(arguments, "train_sampling_strategy", None)
    if len(stages) > 1 and strategy != "sequential" and _is_set(arguments, "train_sampling_strategy"):
        raise _no_effect("train_sampling_strategy", "rows are shuffled within each stage: leave it out")
    if request.recipe.teacher and _is_set(arguments, "average_tokens_across_devices"):
        raise _no_effect("average_tokens_across_devices", "the distillation loss always does: leave it out")
    if not arguments.fsdp and _has_fsdp_config(arguments):
        raise _no_effect("fsdp_config", "pass --fsdp as well")
    if arguments.fsdp and arguments.parallel_mode != ParallelMode.DISTRIBUTED:
        raise PosEncError("--fsdp needs several processes: run accelerate launch -m hf_posenc train, or leave it out")
    _check_model_options(arguments)
    _check_optimizer(arguments)
    _check_scheduler(arguments)


def _has_fsdp_config(arguments: TrainingArguments) -> bool:
    """Whether there are FSDP settings; old releases of transformers always set a dict of switches, all of them off."""
    config = arguments.fsdp_config
    return any(config.values()) if isinstance(config, dict) else bool(config)


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


def check_metric(arguments: TrainingArguments, objective: Objective) -> None:
    """Raise PosEncError if no evaluation reports `metric_for_best_model`, or if its worst value would be the best."""
    if arguments.metric_for_best_model is None:
        return
    name, metrics = arguments.metric_for_best_model.removeprefix("eval_"), ["loss"]
    metrics += ["perplexity"] if objective.predicts_tokens else []
    metrics += ["accuracy"] if objective is Objective.CLASSIFICATION else []
    if name not in metrics:
        raise PosEncError(f"--metric-for-best-model must be one of {', '.join(metrics)}; got {truncate_repr(name)}")
    if name == "perplexity" and arguments.greater_is_better:  # the default of transformers for all but losses
        raise PosEncError("Lower perplexities are better: pass --greater-is-better false, or use the metric loss")


@contextmanager
def translate_construction_errors(options: str, *others: type[Exception]) -> Iterator[None]:
    """Raise `CONSTRUCTION_ERRORS`, and others, as `PosEncError` that names the options at fault.

    Only for blocks that build something from the user's arguments: elsewhere such errors are bugs.
    """
    errors: tuple[type[Exception], ...] = (*CONSTRUCTION_ERRORS, *others)
    try:
        yield
    except PosEncError:
        raise
    except errors as error:
        raise PosEncError(f"{options} cannot be used: {truncate_repr(error, str)}") from error


def _check_evaluation(request: TrainRequest, arguments: TrainingArguments) -> None:
    """Refuse arguments about evaluations that do not take place."""
    for name in EVALUATION_FIELDS if request.eval_data is None else ():
        if _is_set(arguments, name):
            raise _no_effect(name, "there is nothing to evaluate on: pass --eval-data")
    saves_best = str(getattr(arguments.save_strategy, "value", arguments.save_strategy)) == "best"
    if str(getattr(arguments.eval_strategy, "value", arguments.eval_strategy)) == "no":
        way_out = "there are no evaluations during the training: pass --eval-data and --eval-strategy steps or epoch"
        for name in STRATEGY_FIELDS:
            if _is_set(arguments, name):
                raise _no_effect(name, way_out)
        if saves_best:
            raise PosEncError(f"--save-strategy best saves nothing: {way_out}")
    if saves_best and arguments.metric_for_best_model is None:
        raise PosEncError("--save-strategy best needs a metric: pass --metric-for-best-model loss")
    if arguments.load_best_model_at_end and is_sharded(arguments):
        raise PosEncError(
            "--load-best-model-at-end does not work with FSDP or DeepSpeed: leave it out, and load the best checkpoint "
            "from the output directory"
        )


def _check_model_options(arguments: TrainingArguments) -> None:
    """Try the options of gradient checkpointing and compilation, which are used in the first step."""
    for name in ("gradient_checkpointing_kwargs", "activation_checkpointing_kwargs"):
        options: Any = getattr(arguments, name, None)
        if options is not None:
            with translate_construction_errors(f"{_flag(name)} (a JSON object)"):
                options = {"use_reentrant": False, **options}
                checkpoint(torch.nn.Identity(), torch.zeros(1, requires_grad=True), **options)
    if arguments.torch_compile:
        from accelerate.utils import DynamoBackend

        backend = str(arguments.torch_compile_backend).lower()
        backends = [item.value.lower() for item in DynamoBackend]
        if backend not in backends:
            raise PosEncError(f"Unknown --torch-compile-backend {backend!r}; expected one of {', '.join(backends)}")
        with translate_construction_errors("--torch-compile-backend or --torch-compile-mode", RuntimeError):
            torch.compile(torch.nn.Identity(), backend=backend, mode=arguments.torch_compile_mode)


def _check_optimizer(arguments: TrainingArguments) -> None:
    """Refuse optimizers that are not installed, and arguments that they do not take."""
    name = str(getattr(arguments.optim, "value", arguments.optim))
    if arguments.optim_target_modules and not any(family in name for family in LOW_RANK_OPTIMIZERS):
        raise _no_effect("optim_target_modules", f"{name} is for all modules: leave it out, or change --optim")
    plain = copy.copy(arguments)
    plain.optim_args = None
    with translate_construction_errors(f"--optim {name}"):
        try:
            default = Trainer.get_optimizer_cls_and_kwargs(plain)
        except ValueError:  # it needs the model, and is built later
            return
    for item in (arguments.optim_args or "").replace(" ", "").split(","):
        plain.optim_args = item
        with translate_construction_errors("--optim-args (name=value,name=value)"):
            if item and Trainer.get_optimizer_cls_and_kwargs(plain) == default:
                raise _no_effect("optim_args", f"{name} does not take {item}, or it is the default. Leave it out")


def _check_scheduler(arguments: TrainingArguments) -> None:
    """Build the schedule for an optimizer with a single parameter."""
    options: Any = arguments.lr_scheduler_kwargs
    if options is None:
        return
    name = str(getattr(arguments.lr_scheduler_type, "value", arguments.lr_scheduler_type))
    if name in WITHOUT_OPTIONS:
        raise _no_effect("lr_scheduler_kwargs", f"the schedule {name} has no options: leave it out")
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=arguments.learning_rate)
    steps = {"num_warmup_steps": 0, "num_training_steps": max(arguments.max_steps, 1)}
    with translate_construction_errors("--lr-scheduler-kwargs (a JSON object)"):
        get_scheduler(arguments.lr_scheduler_type, optimizer, **steps, scheduler_specific_kwargs={**options})


def _number(arguments: TrainingArguments, name: str) -> float | None:
    """A number, or None if it is not set, or of another type, such as the `warmup_steps` of some releases."""
    value = getattr(arguments, name, None)
    return value if isinstance(value, (int, float)) else None


def _is_set(arguments: TrainingArguments, name: str) -> bool:
    """Whether an argument differs from its default; False if this release of transformers does not have it."""
    field = next((field for field in dataclasses.fields(arguments) if field.name == name), None)
    if field is None:
        return False
    factory = field.default_factory
    default = field.default if factory is dataclasses.MISSING else factory()
    return getattr(arguments, name) not in (None, default)


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _no_effect(name: str, way_out: str) -> PosEncError:
    return PosEncError(f"{_flag(name)} has no effect here: {way_out}")
