"""One run: convert a checkpoint to a scheme, train it by a recipe, and measure its shortfall at every stage.

The start and the trainer are those of `hf-posenc train`, with its default arguments.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import tempfile
import time
from typing import Any

import torch
from datasets import Dataset
from torch import nn
from transformers import PrinterCallback, TrainingArguments, default_data_collator
from transformers.utils import logging

import hf_posenc
from hf_posenc.cli.train import DEFAULT_ARGUMENTS
from hf_posenc.errors import PosEncError
from hf_posenc.training import Recipe, RecoveryTrainer, Teacher, budget, record_hidden_states, transformer_layers
from hf_posenc.training.data import IGNORE_INDEX
from hf_posenc.training.recipes import DEFAULT_FIT_RATIO, NAIVE, RECOMMENDED
from hf_posenc.training.stock_start import (
    CLOSED_FORM_ROWS,
    FIT_LENGTH,
    FIT_ROWS,
    FIT_ROWS_TABLE,
    start_from_stock_model,
)

from .subjects import SUBJECTS, Subject
from .tasks import Batch

WARMUP_RATIO = 0.05
PIECES: dict[str, dict[str, Any]] = {
    "reordered heads": {"reorder_heads": False},
    "folded rotation": {"fold_rotation": False},
    "matched biases": {"match_biases": False},
    "attention fit": {"fit_ratio": 0.0},
    "distillation": {"teacher": False},
}
METHODS: dict[str, Recipe] = {
    "recipe": RECOMMENDED,
    "naive": NAIVE,
    **{f"without {piece}": dataclasses.replace(RECOMMENDED, **changes) for piece, changes in PIECES.items()},
}
STAGES = ("swapped", "started", "trained")


@dataclasses.dataclass(frozen=True)
class Trial:
    """What to run. `tokens` is the number of unique tokens, and `batch_size` that of rows per step."""

    subject: str
    scheme: Any
    method: str
    tokens: int
    passes: int
    batch_size: int
    learning_rate: float
    seed: int

    @property
    def key(self) -> str:
        return json.dumps(dataclasses.asdict(self), sort_keys=True)


@dataclasses.dataclass
class Outcome:
    """The result of a trial.

    Attributes:
        trial: What was run.
        recipe: Fingerprint of the defaults of `hf-posenc train` at the time.
        tokens_unique: Tokens of the rows that were used.
        tokens_seen: The same, counting a row as often as the training used it.
        seconds: Time of the warm start and the training.
        shortfalls: By text, then by stage.
        notes: Further results, such as an answer to a question.
    """

    trial: Trial
    recipe: str
    tokens_unique: int
    tokens_seen: int
    seconds: float
    shortfalls: dict[str, dict[str, float]]
    notes: dict[str, Any] = dataclasses.field(default_factory=dict)


def recipe_version() -> str:
    """A fingerprint of everything that the recipe and its budget consist of: it changes if a default changes."""
    constants = [getattr(budget, name) for name in dir(budget) if name.isupper()]
    constants += [DEFAULT_FIT_RATIO, CLOSED_FORM_ROWS, FIT_ROWS, FIT_ROWS_TABLE, FIT_LENGTH]
    content = [dataclasses.asdict(RECOMMENDED), dataclasses.asdict(NAIVE), DEFAULT_ARGUMENTS, constants]
    return hashlib.sha256(json.dumps(content, default=str).encode()).hexdigest()[:8]


def start_worker() -> None:
    """Set up a process of the pool."""
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    logging.disable_progress_bar()


def run_trial(trial: Trial, subject: Subject | None = None) -> Outcome:
    """Run a trial in this process."""
    subject = subject or SUBJECTS[trial.subject]
    torch.manual_seed(trial.seed)
    recipe, rows = METHODS[trial.method], _rows(subject, trial)
    measures = {text: make() for text, make in subject.measures.items()}
    stock_model, model = subject.load().eval(), hf_posenc.retrofit(subject.load(), trial.scheme).eval()
    shortfalls = {text: {"swapped": measure(model)} for text, measure in measures.items()}
    tokens, start = rows["input_ids"].numel(), time.monotonic()
    if recipe.starts_from_stock_model:
        dataset = Dataset.from_dict({"input_ids": rows["input_ids"].tolist()})
        start_from_stock_model(stock_model, model, dataset, recipe, "all", subject.length, trial.passes * tokens)
        elapsed = time.monotonic() - start
        for text, measure in measures.items():
            shortfalls[text]["started"] = measure(model.eval())
        start = time.monotonic() - elapsed
    try:
        _train(model, stock_model, recipe, subject, trial, rows)
        seconds, diverged = time.monotonic() - start, False
    except PosEncError:  # the loss is not finite, as may happen at high learning rates
        seconds, diverged = time.monotonic() - start, True
    for text, measure in measures.items():
        shortfalls[text]["trained"] = math.inf if diverged else measure(model.eval())
    return Outcome(trial, recipe_version(), tokens, trial.passes * tokens, round(seconds, 1), shortfalls)


def _rows(subject: Subject, trial: Trial) -> Batch:
    """The rows of a trial, in an order that depends on the seed."""
    assert subject.rows is not None
    rows = subject.rows()
    order = torch.randperm(len(rows["input_ids"]), generator=torch.Generator().manual_seed(trial.seed))
    return {name: values[order[: trial.tokens // subject.length]] for name, values in rows.items()}


def _train(model: Any, stock_model: Any, recipe: Recipe, subject: Subject, trial: Trial, rows: Batch) -> None:
    columns = {name: values.tolist() for name, values in rows.items()}
    if subject.has_head and "targets" not in columns:
        columns["labels"] = columns["input_ids"]
    with tempfile.TemporaryDirectory() as directory:
        arguments = TrainingArguments(
            directory,
            **DEFAULT_ARGUMENTS,
            per_device_train_batch_size=trial.batch_size,
            num_train_epochs=trial.passes,
            learning_rate=trial.learning_rate,
            seed=trial.seed,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
            remove_unused_columns=False,
        )
        trainer = SubjectTrainer(
            model=model,
            args=arguments,
            train_dataset=Dataset.from_dict(columns),
            data_collator=default_data_collator,
            teacher=Teacher(stock_model) if recipe.teacher or not subject.has_head else None,
            loss_weights=recipe.loss_weights,
            hidden_loss_until=recipe.hidden_loss_until,
            position_learning_rate=recipe.position_lr_multiplier * trial.learning_rate,
        )
        trainer.recipe = recipe
        trainer.remove_callback(PrinterCallback)
        trainer.train()


class SubjectTrainer(RecoveryTrainer):
    """The trainer of `hf-posenc train`, with two losses that it does not have.

    Subjects with targets train on those only, and plain fine-tuning of a model without a head trains the cosine
    similarity of its embeddings to the original's.
    """

    recipe: Recipe

    def compute_loss(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        has_targets, distills = "targets" in inputs, self.recipe.teacher
        if not has_targets and (distills or self.teacher is None):
            return super().compute_loss(model, inputs, *args, **kwargs)
        ids = {"input_ids": inputs["input_ids"]}
        with record_hidden_states(transformer_layers(model)) as states:  # type: ignore[arg-type]
            outputs = model(**ids)
        if has_targets and not distills:
            logits, targets = outputs.logits.flatten(0, 1), inputs["targets"].flatten()
            return nn.functional.cross_entropy(logits, targets, ignore_index=IGNORE_INDEX)
        assert self.teacher is not None
        target = self.teacher.forward(ids)
        if not has_targets:
            return target.pooled_distance(outputs.last_hidden_state)
        weights, scale = self.loss_weights, self._hidden_scale()
        divergence = target.kl_divergence(outputs.logits, inputs["targets"] != IGNORE_INDEX)
        return weights.kl * divergence + weights.hidden * scale * target.hidden_distance(states)
