"""One run: convert a checkpoint to a scheme, train it with a method, and measure the shortfall along the way."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from transformers.utils import logging

import hf_posenc
from hf_posenc.patches import architecture_of
from hf_posenc.training import (
    Recipe,
    Teacher,
    absorb_table_mean,
    parameter_groups,
    record_hidden_states,
    resolve_fit_ratio,
    transformer_layers,
)
from hf_posenc.training.data import IGNORE_INDEX
from hf_posenc.training.recipes import DEFAULT_FIT_RATIO, NAIVE, RECOMMENDED

from .tasks import TASKS, Batch, Task

RECOMMENDED_NAME = "recommended"
SHORTER = {f"{RECOMMENDED_NAME}, 1/4 of the tokens": 0.25, f"{RECOMMENDED_NAME}, 1/10 of the tokens": 0.1}
"""Separate runs on a fraction of the tokens, with a learning rate schedule of that length."""
FIT: dict[str, Any] = {"absorb_table_mean": True, "fit_ratio": DEFAULT_FIT_RATIO}
DISTILLATION: dict[str, Any] = {"teacher": True, "hidden_loss_until": math.inf}
EARLIER: dict[str, Any] = {"reorder_heads": False, "fold_rotation": False, "match_biases": False}
"""The pieces that the recipe did not have yet when its runs were made; SMALL_BUDGETS.md measures them."""
METHODS = {
    "naive": NAIVE,
    "naive + distillation": dataclasses.replace(NAIVE, **DISTILLATION),
    "naive + fit": dataclasses.replace(NAIVE, **FIT),
    "naive + fit + distillation": dataclasses.replace(NAIVE, **FIT, **DISTILLATION),
    RECOMMENDED_NAME: dataclasses.replace(RECOMMENDED, **EARLIER),
    **dict.fromkeys(SHORTER, dataclasses.replace(RECOMMENDED, **EARLIER)),
}
WARMUP_RATIO = 0.05


@dataclasses.dataclass(frozen=True)
class Trial:
    task: str
    scheme: Any
    method: str
    learning_rate: float
    seed: int


@dataclasses.dataclass
class Outcome:
    """The learning curve of a trial: pairs of tokens seen and shortfall."""

    trial: Trial
    curve: list[tuple[int, float]]


def start_worker() -> None:
    """Set up a process of the pool."""
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    logging.disable_progress_bar()


def run_trial(trial: Trial, task: Task | None = None) -> Outcome:
    task = task or TASKS[trial.task]
    torch.manual_seed(trial.seed)
    recipe = METHODS[trial.method]
    rows = task.rows()
    shortfall = task.measure()
    length = rows["input_ids"].shape[-1]
    stock_model = task.load()
    model = hf_posenc.retrofit(task.load(), trial.scheme)
    share = resolve_fit_ratio(recipe, architecture_of(model), trial.scheme)
    tokens = SHORTER.get(trial.method, 1.0) * task.tokens
    steps = round((1 - share) * tokens / (task.batch_size * length))
    curve: list[tuple[int, float]] = []
    tokens_seen = 0
    if recipe.absorb_table_mean:
        absorb_table_mean(stock_model, model, length)
    if share:
        number = round(share * tokens / (task.fit_batch_size * length))
        order = torch.randperm(len(rows["input_ids"]))[: number * task.fit_batch_size]
        input_ids = rows["input_ids"][order]
        hf_posenc.fit(stock_model, model, input_ids, projections=True, steps=number, rows=task.fit_batch_size)
        tokens_seen = number * task.fit_batch_size * length
    curve.append((tokens_seen, _measure(shortfall, model)))
    evenly = [number / task.evaluations for number in range(1, task.evaluations + 1)]
    evaluated_steps = {max(round(steps * fraction), 1) for fraction in (0.02, 0.04, 0.07, *evenly)}
    for step in train_steps(model, stock_model, recipe, task, trial, rows, steps):
        tokens_seen += task.batch_size * length
        if step + 1 in evaluated_steps:
            curve.append((tokens_seen, _measure(shortfall, model)))
    return Outcome(trial, curve)


def _measure(shortfall: Any, model: Any) -> float:
    model.eval()
    value = shortfall(model)
    model.train()
    return value


def train_steps(
    model: Any, stock_model: Any, recipe: Recipe, task: Task, trial: Trial, rows: Batch, steps: int
) -> Iterator[int]:
    """Train a model as the recipe says; yields after every step."""
    teacher = Teacher(stock_model) if recipe.teacher or not task.has_head else None
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = parameter_groups(model, trial.learning_rate, recipe.position_lr_multiplier * trial.learning_rate)
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.98))
    warmup = max(round(WARMUP_RATIO * steps), 1)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / warmup, 1) * (0.51 + 0.49 * math.cos(math.pi * step / steps))
    )
    model.train()
    for step, batch in zip(range(steps), _batches(rows, task.batch_size, trial.seed), strict=False):
        states_weight = max(1 - step / (recipe.hidden_loss_until * steps), 0.0)
        loss = _loss(model, teacher, recipe, batch, states_weight)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        schedule.step()
        yield step


def _batches(rows: Batch, batch_size: int, seed: int) -> Iterator[Batch]:
    generator = torch.Generator().manual_seed(seed)
    count = len(rows["input_ids"])
    for _ in itertools.count():
        for indices in torch.randperm(count, generator=generator).split(batch_size):
            if len(indices) == batch_size:
                yield {name: values[indices] for name, values in rows.items()}


def _loss(model: Any, teacher: Teacher | None, recipe: Recipe, batch: Batch, states_weight: float) -> torch.Tensor:
    inputs = {"input_ids": batch["input_ids"]}
    with record_hidden_states(transformer_layers(model)) as states:
        outputs = model(**inputs)
    if "targets" in batch and not recipe.teacher:
        return nn.functional.cross_entropy(
            outputs.logits.flatten(0, 1), batch["targets"].flatten(), ignore_index=IGNORE_INDEX
        )
    assert teacher is not None
    teacher_output = teacher.forward(inputs)
    if not recipe.teacher:  # a model without a head: only its embeddings can be trained
        ours, target = (state.mean(1) for state in (outputs.last_hidden_state, teacher_output.hidden_states[-1]))
        return (1 - nn.functional.cosine_similarity(ours, target)).mean()
    weights = recipe.loss_weights
    if "targets" not in batch:
        terms = teacher_output.losses(dataclasses.replace(weights, kl=0.0), None, states, None, states_weight)
        return torch.stack(list(terms.values())).sum()
    has_target = batch["targets"] != IGNORE_INDEX
    divergence = teacher_output.kl_divergence(outputs.logits, has_target)
    return weights.kl * divergence + weights.hidden * states_weight * teacher_output.hidden_distance(states)
