"""Run a training: from a checkpoint and text to a variant in a directory."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import torch
from transformers import PreTrainedModel, TrainingArguments, set_seed
from transformers.integrations import get_reporting_integration_callbacks

from ..checkpoints import RECOVERY_FILE, list_checkpoints
from ..errors import PosEncError
from .arguments import RunState, TrainRequest, parse_train_length
from .checkpointing import STAGING_DIRECTORY, last_valid_checkpoint, translate_disk_full
from .data import dataset_fingerprint
from .factories import RunBuilder
from .objectives import Objective, compute_accuracy
from .optimizer import add_lora, head_names, train_positions_only
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
        PosEncError: If the arguments contradict each other or an earlier run in the same directory, the disk is full,
            or the training diverges.

    Example:
        >>> request = TrainRequest("gpt2", data="text.txt", train_length="512", scheme="alibi")
        >>> train(request, TrainingArguments("out", max_steps=1000))
    """
    set_seed(arguments.seed)
    directory = Path(arguments.output_dir)
    run_directories = {path.resolve() for path in (directory, *list_checkpoints(directory))}
    for source in (request.model, request.teacher_model):
        if source is not None and Path(source).resolve() in run_directories:
            raise PosEncError(f"{source} is inside --output-dir {directory} and would be overwritten: choose another")
    _check_report_to(arguments)
    stages = parse_train_length(request.train_length, arguments.max_steps)
    if stages[0].steps is not None:
        arguments.max_steps = sum(stage.steps or 0 for stage in stages)
    state = RunState(directory, request, arguments, restart)
    with translate_disk_full(directory):
        with arguments.main_process_first(desc="clearing the output directory"):
            if restart and arguments.process_index == 0:
                state.clear()
        builder = RunBuilder(request, arguments, stages)
        checkpoint = last_valid_checkpoint(directory)
        trainer = _build_trainer(builder, state, warm_start=checkpoint is None)
        if arguments.should_save:
            shutil.rmtree(directory / STAGING_DIRECTORY, ignore_errors=True)
            state.save()
        output = trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
        if trainer.eval_dataset is not None:
            _write_recovery(trainer, builder)
        _save_variant(trainer, builder)
        if arguments.should_save:
            state.save(finished=True, steps=output.global_step, train_loss=output.training_loss)
        trainer.accelerator.wait_for_everyone()
    return directory


def _check_report_to(arguments: TrainingArguments) -> None:
    for name in arguments.report_to:
        try:
            for callback in get_reporting_integration_callbacks([name]):
                callback()
        except (RuntimeError, ImportError, AssertionError, ValueError) as error:
            raise PosEncError(f"--report-to {name} is not available: pip install {name}. {error}") from None


def _build_trainer(builder: RunBuilder, state: RunState, warm_start: bool) -> RecoveryTrainer:
    request, arguments, recipe, teacher = builder.request, builder.arguments, builder.request.recipe, builder.teacher
    rows = builder.build_rows()
    state.set_dataset(dataset_fingerprint(rows))
    model = builder.build_student(rows, warm_start)
    _choose_parameters(model, request, builder.objective)
    weights = recipe.loss_weights
    if teacher is not None and teacher.has_new_head:  # it predicts at random: learn from the labels instead
        weights = dataclasses.replace(weights, kl=0.0, label=weights.label or 1.0)
    # The parameters of a variant have been trained already.
    multiplier = recipe.position_lr_multiplier if request.scheme is not None else 1.0
    return RecoveryTrainer(
        model=model,
        args=arguments,
        train_dataset=rows,
        eval_dataset=builder.build_eval_rows(),
        processing_class=builder.tokenizer,
        data_collator=builder.objective.data_collator(builder.tokenizer, builder.packing, request.mlm_probability),
        compute_metrics=compute_accuracy if builder.labels is not None else None,
        teacher=teacher,
        loss_weights=weights,
        hidden_loss_until=recipe.hidden_loss_until,
        position_learning_rate=request.position_learning_rate or multiplier * arguments.learning_rate,
        predicts_tokens=builder.objective.predicts_tokens,
        has_adapters=request.trainable == "lora",
    )


def _choose_parameters(model: PreTrainedModel, request: TrainRequest, objective: Objective) -> None:
    """A classifier's head may be new, so it is always trained."""
    if request.trainable == "positions":
        train_positions_only(model)
    elif request.trainable == "lora":
        add_lora(model, request.lora_rank, [] if objective.predicts_tokens else head_names(model))
    if objective is Objective.CLASSIFICATION:
        for name in head_names(model):
            model.get_submodule(name).requires_grad_(True)


def _write_recovery(trainer: RecoveryTrainer, builder: RunBuilder) -> None:
    """Write the metrics of the variant and of the original model to recovery.json."""
    teacher = builder.teacher
    is_comparable = (
        teacher is not None
        and not (builder.request.teacher_model or teacher.has_new_head)
        and builder.objective is not Objective.FEATURE_EXTRACTION
        and builder.stages[-1].length <= teacher.max_length
    )
    metrics = []
    for evaluate in (trainer.evaluate, trainer.evaluate_teacher) if is_comparable else (trainer.evaluate,):
        with torch.random.fork_rng(devices=[]):  # both are evaluated with the same tokens masked
            torch.manual_seed(trainer.args.seed + trainer.args.process_index)
            values = evaluate()
        names = ("eval_loss", "eval_perplexity", "eval_accuracy")
        metrics.append({name: values[name] for name in names if name in values})
    if trainer.args.should_save:
        recovery = metrics[0] | ({"original": metrics[1]} if any(metrics[1:]) else {})
        path = Path(trainer.args.output_dir) / RECOVERY_FILE
        path.write_text(json.dumps(recovery, indent=1), encoding="utf-8")


def _save_variant(trainer: RecoveryTrainer, builder: RunBuilder) -> None:
    """Save to a staging directory first, in the dtype of the original checkpoint; config.json is moved last."""
    trainer.check_finite_weights()
    config, directory = builder.config, Path(trainer.args.output_dir)
    trainer.model.config.use_cache = getattr(config, "use_cache", False)  # Trainer turns it off
    if not (trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled):  # shards keep the dtype they were trained in
        dtype = config.dtype or torch.float32
        trainer.model.to(getattr(torch, dtype) if isinstance(dtype, str) else dtype)
    staging = directory / STAGING_DIRECTORY
    try:
        trainer.save_model(str(staging))
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise
    trainer.accelerator.wait_for_everyone()
    if trainer.args.should_save:
        for path in sorted(staging.iterdir(), key=lambda path: path.name == "config.json"):
            path.replace(directory / path.name)
        staging.rmdir()
