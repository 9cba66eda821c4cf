"""Train a model under a new encoding: from a checkpoint and a text to a variant in a directory."""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import TrainingArguments, set_seed
from transformers.utils import logging

from ..handover import Handover
from ..patches.handing import schedule_in
from .centring import centre_tables
from .classes import Classes, accuracy, classes_of
from .corpus import Corpus
from .fitting import fit
from .lora import add_lora
from .objective import Objective, objective_of
from .parameters import train_positions_only
from .parts import (
    config_of,
    corpus_for,
    documents_of,
    load,
    student_of,
    teacher_of,
    tokenizer_of,
    told_apart,
)
from .recipe import share_to_fit
from .recovering import RecoveryTrainer
from .reports import refuse_reports
from .request import RECOVERY, SELF, Note, Request
from .saving import UNFINISHED, last_whole_checkpoint, told_when_full
from .stages import Stage, Staged, read_stages
from .teacher import Teacher, Weights, architecture_of
from .texts import IDS, read

logger = logging.get_logger(__name__)
SETTINGS_THAT_MATTER = (
    "max_steps",
    "num_train_epochs",
    "learning_rate",
    "seed",
    "data_seed",
    "bf16",
    "fp16",
    "lr_scheduler_type",
    "warmup_steps",
    "lr_scheduler_kwargs",
    "weight_decay",
    "max_grad_norm",
    "optim",
    "adam_beta1",
    "adam_beta2",
    "adam_epsilon",
    "label_smoothing_factor",
)
"""TrainingArguments that a run cannot go on with when they have changed. And with as many rows a step: on more devices
it can, with fewer rows on each."""
FIT_ROWS, FIT_LENGTH, MOST_FIT_STEPS = 2, 128, 2000
"""Small batches of short rows fit best for what they cost. Beyond so many steps, little is gained."""


@dataclasses.dataclass
class Run:
    """All that a training run needs, ready to be started."""

    trainer: RecoveryTrainer
    note: Note
    directory: Path
    objective: Objective
    use_cache: bool
    """What the config says of it, which is off while a Trainer has the model."""
    has_original: bool
    """Whether the teacher is the model as it was, and can read the rows to evaluate on."""


def train(request: Request, arguments: TrainingArguments, restart: bool = False) -> Path:
    """Train as asked, and leave the variant in `arguments.output_dir`, loadable by Auto classes.

    Asked again for the same after it was interrupted, it goes on from the last checkpoint that is whole.
    """
    set_seed(arguments.seed)
    directory = Path(arguments.output_dir)
    if directory.resolve() == Path(request.model).resolve():
        raise ValueError(f"--output-dir is where the model comes from, {directory}: take another, so that it is kept")
    refuse_reports(arguments)
    stages = read_stages(request.train_length, arguments.max_steps)
    if stages[0].steps is not None:
        arguments.max_steps = sum(stage.steps or 0 for stage in stages)
    settings = json.loads(json.dumps({name: getattr(arguments, name) for name in SETTINGS_THAT_MATTER}, default=str))
    note = Note.of(directory, request, {**settings, "rows_a_step": rows_a_step(arguments)}, restart)
    with told_when_full(directory):
        with arguments.main_process_first(desc="clearing the directory"):
            if restart and arguments.process_index == 0:
                note.clear()
        run = prepare(request, arguments, stages, note, directory)
        checkpoint = last_whole_checkpoint(directory)
        if arguments.should_save:
            shutil.rmtree(directory / UNFINISHED, ignore_errors=True)
            note.write()
        done = run.trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
        note.values |= {"steps": done.global_step, "train_loss": done.training_loss}
        finish(run)
    return directory


def rows_a_step(arguments: TrainingArguments) -> int:
    return arguments.train_batch_size * arguments.gradient_accumulation_steps * arguments.world_size


def prepare(request: Request, arguments: TrainingArguments, stages: list[Stage], note: Note, directory: Path) -> Run:
    config = config_of(request)
    objective = objective_of(config, request.task)
    packing = request.packing if request.packing is not None else objective is Objective.CAUSAL
    tokenizer = tokenizer_of(request, objective)
    classes = None
    if objective is Objective.CLASSIFICATION:
        labelled = read(request.data, request.split, request.streaming)
        classes = classes_of(config, objective_of(config) is objective, labelled, request.label_column)
    teacher = teacher_of(request, objective, packing, classes)
    if classes is not None and teacher is not None and teacher.head_is_new and not request.recipe.weights.labels:
        teacher = None  # it knows nothing of the classes, and its states are not those that tell them apart
    _refuse_what_cannot_be_learnt(objective, teacher, request)

    corpus = corpus_for(tokenizer, request, objective, packing, classes)
    rows = _training_rows(request, arguments, directory, objective, stages, corpus, teacher)
    note.add_rows(told_apart(rows))
    steps = _number_of_steps(rows, arguments)
    fresh = last_whole_checkpoint(directory) is None
    model = _student(request, objective, rows, rows_a_step(arguments), steps, stages, fresh, classes)
    if objective is Objective.CLASSIFICATION:
        _know_the_padding([model, *([teacher.model] if teacher else [])], tokenizer)
    _choose_parameters(model, request)
    use_cache = getattr(model.config, "use_cache", False)
    evaluated = None
    if request.eval_data is not None:
        evaluated = corpus(stages[-1].length).rows(read(request.eval_data, request.eval_split))
    recipe = request.recipe
    trainer = RecoveryTrainer(
        model=model,
        args=arguments,
        train_dataset=rows,
        eval_dataset=evaluated,
        processing_class=tokenizer,
        data_collator=objective.collator(tokenizer, packing, request.mask_share),
        compute_metrics=accuracy if objective is Objective.CLASSIFICATION else None,
        teacher=teacher,
        weights=_weights(request, teacher),
        states_until=recipe.states_until,
        position_learning_rate=request.position_learning_rate or recipe.position_rate * arguments.learning_rate,
        predicts_tokens=objective.predicts_tokens,
        callbacks=[Handover(model)] if schedule_in(model) else None,
    )
    trainer.has_adapters = request.trained == "lora"
    has_original = (
        teacher is not None
        and not (request.teacher or teacher.head_is_new or objective is Objective.STATES)
        and stages[-1].length <= teacher.longest
    )
    return Run(trainer, note, directory, objective, use_cache, has_original)


def _weights(request: Request, teacher: Teacher | None) -> Weights:
    """Of a teacher whose head is new, what it predicts is nothing to learn: there are labels."""
    weights = request.recipe.weights
    if teacher is None or not teacher.head_is_new:
        return weights
    return dataclasses.replace(weights, predictions=0.0, labels=weights.labels or 1.0)


def _know_the_padding(models: list[Any], tokenizer: Any) -> None:
    """Decoders that classify look for the last token that is none."""
    for model in models:
        if getattr(model.config, "pad_token_id", None) is None:
            model.config.pad_token_id = tokenizer.pad_token_id


def _refuse_what_cannot_be_learnt(objective: Objective, teacher: Teacher | None, request: Request) -> None:
    if objective is Objective.STATES and teacher is None:
        raise ValueError(
            f"{request.model} has no head, so that there is nothing to learn but a teacher's states: leave the teacher "
            "on, or name a --task"
        )
    if request.data == SELF and objective is not Objective.CAUSAL:
        raise ValueError("only a causal model can write its own text: pass --data with text for this one")


def _training_rows(
    request: Request,
    arguments: TrainingArguments,
    directory: Path,
    objective: Objective,
    stages: list[Stage],
    corpus: Callable[[int], Corpus],
    teacher: Teacher | None,
) -> Any:
    wanted = max(arguments.max_steps, 0) * rows_a_step(arguments) or 10**9
    longest = max(stage.length for stage in stages)
    writer: Any = teacher
    if request.data == SELF and teacher is None:
        writer = load(objective.auto_class, request)
    documents = documents_of(request, directory, writer, wanted, longest, arguments.process_index == 0)
    by_length = [corpus(stage.length).rows(documents) for stage in stages]
    if len(stages) == 1:
        return by_length[0]
    if request.streaming:
        raise ValueError("a stream has no stages: train one length after the other, each from the model before")
    return Staged(by_length, [(stage.steps or 0) * rows_a_step(arguments) for stage in stages], arguments.seed)


def _number_of_steps(rows: Any, arguments: TrainingArguments) -> int:
    if arguments.max_steps > 0:
        return arguments.max_steps
    if not hasattr(rows, "__len__"):
        raise ValueError("a stream has no end: say how many --max-steps to train")
    return math.ceil(math.ceil(len(rows) / rows_a_step(arguments)) * arguments.num_train_epochs)


def _student(
    request: Request,
    objective: Objective,
    rows: Any,
    rows_at_once: int,
    steps: int,
    stages: list[Stage],
    fresh: bool,
    classes: Classes | None,
) -> Any:
    """Fitted, unless there is a checkpoint to go on from, which has been."""
    recipe = request.recipe
    handover_steps = math.ceil(recipe.handover * steps) if recipe.handover else None
    begins = request.scheme is not None and fresh and (recipe.centre or recipe.fit != 0)
    model = student_of(request, objective, handover_steps or (1 if begins else None), classes)
    if begins and recipe.centre and request.trained == "all":
        centre_tables(model, min(stages[0].length, model.config.max_position_embeddings))
    fits = begins and objective is not Objective.CLASSIFICATION
    share = share_to_fit(recipe, architecture_of(model)) if fits else 0.0
    if share:
        length = min(stages[0].length, FIT_LENGTH, model.config.max_position_embeddings)
        tokens = share * steps * rows_at_once * stages[0].length
        number = min(math.ceil(tokens / (FIT_ROWS * length)), MOST_FIT_STEPS)
        ids = _some_rows(rows, number * FIT_ROWS, length)
        found = fit(model, ids, projections=request.trained == "all", steps=number, rows=FIT_ROWS, progress=True)
        logger.info(f"attention fitted: {found.before:.4f} to {found.after:.4f} nats from that of the old encoding")
        _same_everywhere(model)
    if schedule_in(model) and not handover_steps:
        Handover(model).finish()
    return model


def _some_rows(rows: Any, count: int, length: int) -> torch.Tensor:
    """Token ids, (rows, length), of rows that are long enough; from the beginning again where there are too few."""
    found: list[list[int]] = []
    for row in rows:
        if len(row[IDS]) >= length:
            found.append(row[IDS][:length])
        if len(found) == count:
            break
    if not found:
        raise ValueError(f"no row of the text has {length} tokens to fit attention on: pass --fit-share 0")
    return torch.tensor(found)


def _same_everywhere(model: Any) -> None:
    """What the first process has fitted, for all: they may differ in the last bit."""
    if torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
        for parameter in model.parameters():
            torch.distributed.broadcast(parameter.data, 0)


def _choose_parameters(model: Any, request: Request) -> None:
    if request.trained == "positions":
        train_positions_only(model)
    elif request.trained == "lora":
        add_lora(model, request.lora_rank)


def finish(run: Run) -> None:
    """Evaluate, and put the variant into its place: written beside it first, the config last."""
    trainer, directory = run.trainer, run.directory
    if trainer.eval_dataset is not None:
        _write_recovery(run)
    trainer.refuse_unsound_weights()
    schedule = schedule_in(trainer.model)
    if schedule is not None:
        logger.warning(f"the handover is not over: it has come to step {schedule.step} of {schedule.steps}")
    trainer.model.config.use_cache = run.use_cache
    staging = directory / UNFINISHED
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
        run.note.write(finished=True)
    trainer.accelerator.wait_for_everyone()


def _write_recovery(run: Run) -> None:
    trainer = run.trainer
    found: dict[str, Any] = _figures(trainer.evaluate())
    original = _figures(trainer.evaluate_teacher()) if run.has_original else {}
    if original:
        found["original"] = original
    if trainer.args.should_save:
        (run.directory / RECOVERY).write_text(json.dumps(found, indent=1), encoding="utf-8")


def _figures(metrics: dict[str, float]) -> dict[str, float]:
    return {key: value for key, value in metrics.items() if key in ("eval_loss", "eval_perplexity", "eval_accuracy")}
