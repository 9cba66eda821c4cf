"""Run a training: from a checkpoint and text to a variant in a directory."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel, TrainingArguments, set_seed

from ..checkpoints import RECOVERY_FILE, list_checkpoints
from ..errors import PosEncError
from ..text_data import load_text_dataset
from .arguments import (
    SELF_GENERATED,
    RunState,
    Stage,
    TrainRequest,
    check_report_to,
    parse_train_length,
    rows_per_step,
)
from .checkpointing import STAGING_DIRECTORY, last_valid_checkpoint, translate_disk_full
from .data import RowBuilder, dataset_fingerprint
from .distillation import LossWeights, Teacher
from .factories import build_student, build_teacher, build_training_rows, load_config, load_tokenizer
from .objectives import Labels, Objective, compute_accuracy, infer_objective
from .optimizer import add_lora, head_names, train_positions_only
from .trainer import RecoveryTrainer


@dataclasses.dataclass(frozen=True)
class PreparedRun:
    """A trainer ready to start, and what is needed to save its model at the end."""

    trainer: RecoveryTrainer
    directory: Path
    use_cache: bool
    """The config's value, which `Trainer` turns off."""
    dtype: torch.dtype
    """The dtype of the checkpoint, and of the variant that is saved."""
    evaluates_original: bool


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
    check_report_to(arguments)
    stages = parse_train_length(request.train_length, arguments.max_steps)
    if stages[0].steps is not None:
        arguments.max_steps = sum(stage.steps or 0 for stage in stages)
    state = RunState(directory, request, arguments, restart)
    with translate_disk_full(directory):
        with arguments.main_process_first(desc="clearing the output directory"):
            if restart and arguments.process_index == 0:
                state.clear()
        run = prepare(request, arguments, stages, state)
        checkpoint = last_valid_checkpoint(directory)
        if arguments.should_save:
            shutil.rmtree(directory / STAGING_DIRECTORY, ignore_errors=True)
            state.save()
        output = run.trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
        _save_variant(run)
        if arguments.should_save:
            state.save(finished=True, steps=output.global_step, train_loss=output.training_loss)
        run.trainer.accelerator.wait_for_everyone()
    return directory


def prepare(request: TrainRequest, arguments: TrainingArguments, stages: list[Stage], state: RunState) -> PreparedRun:
    """Build everything that a run needs. Raises PosEncError before any training if something does not fit."""
    config = load_config(request)
    objective = infer_objective(config, request.task)
    packing = request.packing if request.packing is not None else objective is Objective.CAUSAL
    tokenizer = load_tokenizer(request, objective)
    labels = _find_labels(request, config) if objective is Objective.CLASSIFICATION else None
    config_fields: dict[str, Any] = labels.config_fields if labels is not None else {}
    teacher = build_teacher(request, objective, packing, config_fields)
    stock_model = teacher.model if teacher is not None and request.teacher_model is None else None
    if labels is not None and teacher is not None and teacher.has_new_head and not request.recipe.loss_weights.label:
        teacher = None  # it knows nothing about the classes
    _check_learnable(request, arguments, objective, teacher, max(stage.length for stage in stages))

    columns = (request.text_column, request.label_column)
    builders = [RowBuilder(tokenizer, stage.length, objective, packing, *columns, labels) for stage in stages]
    generator = teacher.model if teacher is not None else None
    rows = build_training_rows(request, arguments, objective, stages, builders, generator)
    state.set_dataset(dataset_fingerprint(rows))
    directory = Path(arguments.output_dir)
    fit_tokens = _count_steps(rows, arguments) * rows_per_step(arguments) * stages[0].length
    warm_start = last_valid_checkpoint(directory) is None
    model = build_student(
        request, objective, stock_model, rows, fit_tokens, stages[0], arguments.device, warm_start, config_fields
    )
    if labels is not None and tokenizer is not None:  # decoders classify by the last token that is not padding
        for classifier in (model, teacher.model if teacher is not None else model):
            if getattr(classifier.config, "pad_token_id", None) is None:
                classifier.config.pad_token_id = tokenizer.pad_token_id
    _choose_parameters(model, request, objective)
    use_cache = getattr(model.config, "use_cache", False)
    eval_rows = None
    if request.eval_data is not None:
        eval_rows = builders[-1].build(load_text_dataset(request.eval_data, request.eval_split))
    # The parameters of a variant have been trained already.
    multiplier = request.recipe.position_lr_multiplier if request.scheme is not None else 1.0
    trainer = RecoveryTrainer(
        model=model,
        args=arguments,
        train_dataset=rows,
        eval_dataset=eval_rows,
        processing_class=tokenizer,
        data_collator=objective.data_collator(tokenizer, packing, request.mlm_probability),
        compute_metrics=compute_accuracy if labels is not None else None,
        teacher=teacher,
        loss_weights=_loss_weights(request, teacher),
        hidden_loss_until=request.recipe.hidden_loss_until,
        position_learning_rate=request.position_learning_rate or multiplier * arguments.learning_rate,
        predicts_tokens=objective.predicts_tokens,
        has_adapters=request.trainable == "lora",
    )
    evaluates_original = (
        teacher is not None
        and not (request.teacher_model or teacher.has_new_head or objective is Objective.FEATURE_EXTRACTION)
        and stages[-1].length <= teacher.max_length
    )
    dtype = config.dtype if isinstance(config.dtype, torch.dtype) else getattr(torch, config.dtype or "float32")
    return PreparedRun(trainer, directory, use_cache, dtype, evaluates_original)


def _find_labels(request: TrainRequest, config: PreTrainedConfig) -> Labels:
    documents = load_text_dataset(request.data, request.split, request.streaming)
    has_head = infer_objective(config) is Objective.CLASSIFICATION
    return Labels.find(config, has_head, documents, request.label_column)


def _loss_weights(request: TrainRequest, teacher: Teacher | None) -> LossWeights:
    """A teacher with an untrained head predicts at random: its predictions are replaced by the labels."""
    weights = request.recipe.loss_weights
    if teacher is None or not teacher.has_new_head:
        return weights
    return dataclasses.replace(weights, kl=0.0, label=weights.label or 1.0)


def _check_learnable(
    request: TrainRequest,
    arguments: TrainingArguments,
    objective: Objective,
    teacher: Teacher | None,
    max_length: int,
) -> None:
    if objective is Objective.FEATURE_EXTRACTION and teacher is None:
        raise PosEncError(
            f"{request.model} has no head, so it can only learn a teacher's hidden states: leave the teacher on, or "
            "set --task"
        )
    if request.data == SELF_GENERATED and objective is not Objective.CAUSAL:
        raise PosEncError("Only causal models can generate their own text: pass --data with text")
    if teacher is None:
        return
    if max_length > teacher.max_length and (
        request.data == SELF_GENERATED or objective is Objective.FEATURE_EXTRACTION
    ):
        raise PosEncError(
            f"Rows of {max_length} tokens are longer than the {teacher.max_length} that the teacher can read, and "
            "there is nothing else to learn from: lower --train-length"
            + (", or pass --data with text" if request.data == SELF_GENERATED else "")
        )
    if arguments.label_smoothing_factor:
        raise PosEncError("--label-smoothing-factor has no effect with a teacher: pass --no-teacher, or leave it out")


def _count_steps(rows: Any, arguments: TrainingArguments) -> int:
    if arguments.max_steps > 0:
        return arguments.max_steps
    if not hasattr(rows, "__len__"):
        raise PosEncError("Streamed data has no known size: set --max-steps")
    return math.ceil(math.ceil(len(rows) / rows_per_step(arguments)) * arguments.num_train_epochs)


def _choose_parameters(model: PreTrainedModel, request: TrainRequest, objective: Objective) -> None:
    """A classifier's head may be new, so it is always trained."""
    if request.trainable == "positions":
        train_positions_only(model)
    elif request.trainable == "lora":
        add_lora(model, request.lora_rank, [] if objective.predicts_tokens else head_names(model))
    if objective is Objective.CLASSIFICATION:
        for name in head_names(model):
            model.get_submodule(name).requires_grad_(True)


def _save_variant(run: PreparedRun) -> None:
    """Evaluate, then save the variant: to a staging directory first, with config.json moved last."""
    trainer, directory = run.trainer, run.directory
    if trainer.eval_dataset is not None:
        _write_recovery(run)
    trainer.check_finite_weights()
    trainer.model.config.use_cache = run.use_cache
    if not (trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled):  # shards keep the dtype they were trained in
        trainer.model.to(run.dtype)
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


def _write_recovery(run: PreparedRun) -> None:
    """Write the metrics of the variant and of the original model to recovery.json."""
    trainer = run.trainer
    with _fixed_seed(trainer.args):
        metrics: dict[str, Any] = _select_metrics(trainer.evaluate())
    if run.evaluates_original:
        with _fixed_seed(trainer.args):
            original = _select_metrics(trainer.evaluate_teacher())
        metrics |= {"original": original} if original else {}
    if trainer.args.should_save:
        (run.directory / RECOVERY_FILE).write_text(json.dumps(metrics, indent=1), encoding="utf-8")


@contextlib.contextmanager
def _fixed_seed(arguments: TrainingArguments) -> Iterator[None]:
    """Both models are evaluated with the same tokens masked."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(arguments.seed + arguments.process_index)
        yield


def _select_metrics(metrics: dict[str, float]) -> dict[str, float]:
    return {name: metrics[name] for name in ("eval_loss", "eval_perplexity", "eval_accuracy") if name in metrics}
