"""Run a training: from a checkpoint and text to a variant in a directory."""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import torch
from transformers import PreTrainedModel, TrainingArguments, set_seed
from transformers.integrations import get_reporting_integration_callbacks
from transformers.trainer_utils import TrainOutput

from ..checkpoints import list_checkpoints, lock_output, move_files, write_max_length
from ..errors import PosEncError
from ..patches import (
    base_models,
    check_config_length,
    check_max_length,
    config_length,
    set_config_length,
    table_length,
)
from ..text_data import translate_data_errors
from .argument_checks import check_numbers, check_training_arguments, translate_construction_errors
from .arguments import Stage, TrainRequest, parse_train_length, rows_per_step
from .checkpointing import STAGING_DIRECTORY, last_valid_checkpoint, translate_disk_full
from .data import dataset_fingerprint
from .factories import RunBuilder
from .fingerprints import MODEL, TEACHER, digest
from .objectives import Objective, compute_accuracy
from .optimizer import add_lora, head_names, train_positions_only
from .progress import label_progress_bars
from .report import RecoveryReport
from .run_state import TEACHER_CACHE, RunState
from .source_files import check_source_links, read_companions
from .teacher_cache import TeacherCache
from .trainer import RecoveryTrainer


def train(request: TrainRequest, arguments: TrainingArguments, restart: bool = False) -> Path:
    """Train a model under a new position scheme.

    If the run is interrupted, call it again with the same arguments to resume from the last checkpoint.

    Args:
        request: What to train, on which data, by which recipe.
        arguments: transformers' training arguments. The variant is saved in `output_dir`.
        restart: Delete an earlier run in `output_dir`.

    Returns:
        The directory of the variant, for `AutoModel.from_pretrained`.

    Raises:
        PosEncError: If the arguments contradict each other or an earlier run in the same directory, another process
            writes to it, the disk is full, or the training diverges.

    Example:
        >>> request = TrainRequest("gpt2", data="text.txt", train_length="512", scheme="alibi")
        >>> train(request, TrainingArguments("out", max_steps=1000))
    """
    directory = Path(arguments.output_dir)
    run_directories = {path.resolve() for path in (directory, *list_checkpoints(directory))}
    for source in (request.model, request.teacher_model):
        if source is not None and Path(source).resolve() in run_directories:
            raise PosEncError(f"{source} is inside --output-dir {directory} and would be overwritten: choose another")
    check_source_links(request)
    _check_report_to(arguments)
    check_numbers(arguments)
    set_seed(arguments.seed)
    stages = parse_train_length(request.train_length, arguments.max_steps)
    if stages[0].steps is not None:
        arguments.max_steps = sum(stage.steps or 0 for stage in stages)
    check_training_arguments(request, arguments, stages)
    with contextlib.ExitStack() as stack:
        with arguments.main_process_first(desc="locking the output directory"):
            if arguments.process_index == 0:
                stack.enter_context(lock_output(directory))
                _check_output_dir(directory)
        return _train(request, arguments, stages, directory, restart)


def _train(
    request: TrainRequest, arguments: TrainingArguments, stages: list[Stage], directory: Path, restart: bool
) -> Path:
    state = RunState(directory, request, arguments, restart)
    with translate_disk_full(directory):
        with arguments.main_process_first(desc="clearing the output directory"):
            if state.needs_clearing and arguments.process_index == 0:
                state.clear()
        builder = RunBuilder(request, arguments, stages)
        state.set_checkpoints(builder.fingerprints)
        checkpoint = last_valid_checkpoint(directory)
        report = RecoveryReport(builder, {} if checkpoint is None else state.measured)
        trainer = _build_trainer(builder, state, report, warm_start=checkpoint is None)
        if arguments.should_save:
            shutil.rmtree(directory / STAGING_DIRECTORY, ignore_errors=True)
            state.save(measured=report.stages)
        with translate_data_errors(request.data, in_training=True):
            output = trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
        report.measure_trained(trainer)
        _save_variant(trainer, builder)
        if arguments.should_save:
            spent = _tokens_and_time(trainer, output, builder, state)
            report.write(directory, **spent)
            state.save(finished=True, steps=output.global_step, train_loss=output.training_loss, **spent)
            # Not earlier: a run that is killed before it has finished resumes with the same predictions.
            shutil.rmtree(directory / TEACHER_CACHE, ignore_errors=True)
        trainer.accelerator.wait_for_everyone()
    return directory


def _check_output_dir(directory: Path) -> None:
    """Fail before anything is loaded if the directory cannot be written."""
    try:
        is_new = not directory.exists()
        directory.mkdir(exist_ok=True)
        with TemporaryFile(dir=directory):
            pass
        if is_new:
            directory.rmdir()
    except OSError as error:
        raise PosEncError(f"Cannot write to --output-dir {directory}: {error}") from error


def _check_report_to(arguments: TrainingArguments) -> None:
    for name in arguments.report_to:
        try:
            for callback in get_reporting_integration_callbacks([name]):
                callback()
        except (RuntimeError, ImportError, AssertionError, ValueError) as error:
            raise PosEncError(f"--report-to {name} is not available: {error}") from None


def _build_trainer(builder: RunBuilder, state: RunState, report: RecoveryReport, warm_start: bool) -> RecoveryTrainer:
    request, arguments, recipe, teacher = builder.request, builder.arguments, builder.request.recipe, builder.teacher
    rows = builder.build_rows()
    with translate_data_errors(request.data):
        state.set_dataset(dataset_fingerprint(rows))
    model = builder.build_student(rows, warm_start, report.measure)
    if request.max_length is not None:
        for base in base_models(model):
            check_max_length(base.position_scheme, request.max_length)
            check_config_length(base.position_scheme, base.config)
    _choose_parameters(model, request, builder.objective)
    weights = recipe.loss_weights
    if teacher is not None and teacher.has_new_head:  # it predicts at random: learn from the labels instead
        weights = dataclasses.replace(weights, kl=0.0, label=weights.label or 1.0)
    cache, hidden_loss_until = _teacher_cache(builder), recipe.hidden_loss_until
    if cache is not None:
        hidden_loss_until = min(hidden_loss_until, 1 / max(arguments.num_train_epochs, 1))
    # The parameters of a variant have been trained already.
    multiplier = recipe.position_lr_multiplier if request.scheme is not None else 1.0
    with translate_construction_errors("The training arguments"):
        trainer = RecoveryTrainer(
            model=model,
            args=arguments,
            train_dataset=rows,
            eval_dataset=report.rows,
            processing_class=builder.tokenizer,
            data_collator=builder.data_collator,
            compute_metrics=compute_accuracy if builder.labels is not None else None,
            teacher=teacher,
            loss_weights=weights,
            hidden_loss_until=hidden_loss_until,
            teacher_cache=cache,
            position_learning_rate=request.position_learning_rate or multiplier * arguments.learning_rate,
            predicts_tokens=builder.objective.predicts_tokens,
            train_collator=builder.train_collator,
            companions=read_companions(request),
            has_adapters=request.trainable == "lora",
        )
    label_progress_bars(trainer)
    return trainer


def _teacher_cache(builder: RunBuilder) -> TeacherCache | None:
    request = builder.request
    if not request.cache_teacher or builder.teacher is None or not builder.objective.predicts_tokens:
        return None
    if builder.objective is Objective.MASKED:
        raise PosEncError("--cache-teacher is for causal models: masked tokens differ in every pass")
    name = f"{request.teacher_model or request.model} {request.revision or ''}".strip()
    weights = digest(builder.fingerprints[TEACHER if request.teacher_model else MODEL])
    return TeacherCache(Path(builder.arguments.output_dir) / TEACHER_CACHE, teacher=f"{name} (sha256 {weights})")


def _choose_parameters(model: PreTrainedModel, request: TrainRequest, objective: Objective) -> None:
    """A classifier's head may be new, so it is always trained."""
    if request.trainable == "positions":
        train_positions_only(model)
    elif request.trainable == "lora":
        add_lora(model, request.lora_rank, [] if objective.predicts_tokens else head_names(model))
    if objective is Objective.CLASSIFICATION:
        for name in head_names(model):
            model.get_submodule(name).requires_grad_(True)


def _tokens_and_time(
    trainer: RecoveryTrainer, output: TrainOutput, builder: RunBuilder, state: RunState
) -> dict[str, Any]:
    """How many tokens the data has and the run saw, and how long it took since it was started or resumed."""
    unique = state.values["dataset"]["num_tokens"]
    if unique is None:
        seen = trainer.state.global_step * rows_per_step(trainer.args) * builder.stages[0].length
    else:
        seen = round(unique * (trainer.state.epoch or 0))
    return {"tokens_unique": unique, "tokens_seen": seen, "train_seconds": output.metrics["train_runtime"]}


def _save_variant(trainer: RecoveryTrainer, builder: RunBuilder) -> None:
    """Save to a staging directory first, in the dtype of the original checkpoint, and then move the files."""
    trainer.check_finite_weights()
    config, directory = builder.config, Path(trainer.args.output_dir)
    trainer.model.config.use_cache = getattr(config, "use_cache", False)  # Trainer turns it off
    if not (trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled):  # shards keep the dtype they were trained in
        dtype = config.dtype or torch.float32
        trainer.model.to(getattr(torch, dtype) if isinstance(dtype, str) else dtype)
    max_length = _set_max_length(trainer.model, builder)
    staging = directory / STAGING_DIRECTORY
    try:
        trainer.save_model(str(staging))
        if trainer.args.should_save:
            assert trainer.companions is not None
            trainer.companions.copy_to(staging, replace=False)
            if max_length is not None:
                write_max_length(staging, max_length, lower=builder.request.max_length is not None)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise
    trainer.accelerator.wait_for_everyone()
    if trainer.args.should_save:
        move_files(staging, directory, last="config.json")


def _set_max_length(model: PreTrainedModel, builder: RunBuilder) -> int | None:
    """Set the longest input in the config, and return it; None if it stays as in the original checkpoint."""
    request, bases = builder.request, base_models(model)
    schemes = [scheme for base in bases for scheme in base.position_scheme]
    trained_length = max([stage.length for stage in builder.stages] + [request.target_length or 0])
    max_length = request.max_length or max(trained_length, table_length(schemes, builder.config) or 0)
    if not bases or (request.max_length is None and max_length <= config_length(builder.config)):
        return None
    if not set_config_length(schemes, bases[0].config, max_length, required=request.max_length is not None):
        return None
    return max_length
