"""Train a model under a new encoding: from a checkpoint and a text to a variant in a directory."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import TrainingArguments, set_seed
from transformers.utils import logging

from ..checkpoints.file_names import RECOVERY_FILE
from ..text_data import load_text_dataset as read
from .classes import accuracy, classes_of
from .corpus import Corpus
from .lora import add_lora
from .objective import Objective, objective_of
from .parameters import heads_of, train_positions_only
from .parts import config_of, corpus_for, documents_of, dtype_of, load, teacher_of, tokenizer_of, told_apart
from .recovering import RecoveryTrainer
from .reports import refuse_reports
from .request import SELF, Note, Request
from .saving import UNFINISHED, checkpoints_in, last_whole_checkpoint, told_when_full
from .stages import Stage, Staged, read_stages
from .student import build_student
from .teacher import Teacher, Weights

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


@dataclasses.dataclass
class Run:
    """All that a training run needs, ready to be started."""

    trainer: RecoveryTrainer
    note: Note
    directory: Path
    use_cache: bool
    """What the config says of it, which is off while a Trainer has the model."""
    dtype: torch.dtype
    """Of the checkpoint's files, and of what is made of them."""
    has_original: bool
    """Whether the teacher is the model as it was, and can read the rows to evaluate on."""


def train(request: Request, arguments: TrainingArguments, restart: bool = False) -> Path:
    """Train as asked, and leave the variant in `arguments.output_dir`, loadable by Auto classes.

    Asked again for the same after it was interrupted, it goes on from the last checkpoint that is whole.
    """
    set_seed(arguments.seed)
    directory = Path(arguments.output_dir)
    for source in (request.model, request.teacher):
        if source is not None and _is_in(directory, Path(source)):
            raise ValueError(f"{source} is in --output-dir, {directory}: take another, so that it is kept")
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


def _is_in(directory: Path, source: Path) -> bool:
    """What the directory holds itself, or a checkpoint of an earlier run: all that a restart throws away."""
    return source.resolve() in {path.resolve() for path in (directory, *checkpoints_in(directory))}


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
    stock_model = teacher.model if teacher is not None and request.teacher is None else None
    if classes is not None and teacher is not None and teacher.head_is_new and not request.recipe.weights.labels:
        teacher = None  # it knows nothing of the classes, and its states are not those that tell them apart
    _refuse_what_cannot_be_learnt(objective, teacher, request, arguments, max(stage.length for stage in stages))

    corpus = corpus_for(tokenizer, request, objective, packing, classes)
    rows = _training_rows(request, arguments, directory, objective, stages, corpus, teacher)
    note.add_rows(told_apart(rows))
    steps = _number_of_steps(rows, arguments)
    fresh = last_whole_checkpoint(directory) is None
    row_count, device = rows_a_step(arguments), arguments.device
    model = build_student(request, objective, stock_model, rows, row_count, steps, stages, not fresh, classes, device)
    if objective is Objective.CLASSIFICATION:
        _know_the_padding([model, *([teacher.model] if teacher else [])], tokenizer)
    _choose_parameters(model, request, objective)
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
        position_learning_rate=request.position_learning_rate or _position_rate(request) * arguments.learning_rate,
        predicts_tokens=objective.predicts_tokens,
    )
    trainer.has_adapters = request.trained == "lora"
    has_original = (
        teacher is not None
        and not (request.teacher or teacher.head_is_new or objective is Objective.STATES)
        and stages[-1].length <= teacher.longest
    )
    return Run(trainer, note, directory, use_cache, dtype_of(config), has_original)


def _position_rate(request: Request) -> float:
    """What a variant brings along has been learnt already."""
    return request.recipe.position_rate if request.scheme is not None else 1.0


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


def _refuse_what_cannot_be_learnt(
    objective: Objective, teacher: Teacher | None, request: Request, arguments: TrainingArguments, longest: int
) -> None:
    if objective is Objective.STATES and teacher is None:
        raise ValueError(
            f"{request.model} has no head, so that there is nothing to learn but a teacher's states: leave the teacher "
            "on, or name a --task"
        )
    if request.data == SELF and objective is not Objective.CAUSAL:
        raise ValueError("only a causal model can write its own text: pass --data with text for this one")
    if teacher is None:
        return
    if longest > teacher.longest and (request.data == SELF or objective is Objective.STATES):
        raise ValueError(
            f"rows of {longest} tokens are longer than the {teacher.longest} that the original can read, and there is "
            "nothing else to learn from: lower --train-length"
            + (", or pass --data with text" if request.data == SELF else "")
        )
    if arguments.label_smoothing_factor:
        raise ValueError("--label-smoothing-factor smooths labels, and a teacher has none: pass --no-teacher, or 0")


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
    writer: Any = None
    if request.data == SELF:
        writer = (teacher.model if teacher is not None else load(objective.auto_class, request)).to(arguments.device)
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


def _choose_parameters(model: Any, request: Request, objective: Objective) -> None:
    """The head of a classifier is trained in any case: it may be new."""
    if request.trained == "positions":
        train_positions_only(model)
    elif request.trained == "lora":
        add_lora(model, request.lora_rank, [] if objective.predicts_tokens else heads_of(model))
    if objective is Objective.CLASSIFICATION:
        for head in heads_of(model):
            model.get_submodule(head).requires_grad_(True)


def finish(run: Run) -> None:
    """Evaluate, and put the variant into its place: written beside it first, the config last."""
    trainer, directory = run.trainer, run.directory
    if trainer.eval_dataset is not None:
        _write_recovery(run)
    trainer.refuse_unsound_weights()
    trainer.model.config.use_cache = run.use_cache
    if not (trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled):  # in pieces, it stays as it was trained
        trainer.model.to(run.dtype)
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
    with _same_draws(trainer.args):
        found: dict[str, Any] = _figures(trainer.evaluate())
    with _same_draws(trainer.args):
        original = _figures(trainer.evaluate_teacher()) if run.has_original else {}
    if original:
        found["original"] = original
    if trainer.args.should_save:
        (run.directory / RECOVERY_FILE).write_text(json.dumps(found, indent=1), encoding="utf-8")


@contextlib.contextmanager
def _same_draws(arguments: TrainingArguments) -> Iterator[None]:
    """The same tokens are hidden from masked models, each time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(arguments.seed + arguments.process_index)
        yield


def _figures(metrics: dict[str, float]) -> dict[str, float]:
    return {key: value for key, value in metrics.items() if key in ("eval_loss", "eval_perplexity", "eval_accuracy")}
