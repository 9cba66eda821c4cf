"""One run: a checkpoint, a scheme, a method, a learning rate and a seed; how good it is after so many tokens."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

import hf_posenc
from hf_posenc.training.fit import absorb_table_mean, architecture_of
from hf_posenc.training.rates import parameter_groups
from hf_posenc.training.recipe import FIT_SHARE, NAIVE, RECOMMENDED, Recipe, share_to_fit
from hf_posenc.training.rows import IGNORED
from hf_posenc.training.teacher import Teacher, layers_of, recorded

from .subjects import Batch, Subject

RECOMMENDED_NAME = "recommended"
SHORTER = {f"{RECOMMENDED_NAME}, 1/4 of the tokens": 0.25, f"{RECOMMENDED_NAME}, 1/10 of the tokens": 0.1}
"""Runs of their own, whose rate falls with their own tokens: the shares of these that they see."""
METHODS = {
    "naive": NAIVE,
    "naive + teacher": dataclasses.replace(NAIVE, teacher=True, states_until=math.inf),
    "fit": dataclasses.replace(NAIVE, centre=True, fit=FIT_SHARE),
    "fit + teacher": dataclasses.replace(NAIVE, centre=True, fit=FIT_SHARE, teacher=True, states_until=math.inf),
    RECOMMENDED_NAME: RECOMMENDED,
    **dict.fromkeys(SHORTER, RECOMMENDED),
}
"""By the name that the tables have. Without a teacher, the text is all there is to learn from."""
WARMUP = 0.05


@dataclasses.dataclass(frozen=True)
class Trial:
    subject: str
    scheme: Any
    method: str
    rate: float
    seed: int


@dataclasses.dataclass
class Outcome:
    trial: Trial
    curve: list[tuple[int, float]]
    """Tokens seen, and the shortfall from the original: 0 is as good as it was."""


def run(trial: Trial, subject: Subject) -> Outcome:
    torch.manual_seed(trial.seed)
    recipe = METHODS[trial.method]
    rows = subject.rows()
    shortfall = subject.measure()
    length = rows["input_ids"].shape[-1]
    stock_model = subject.load()
    model = hf_posenc.retrofit(subject.load(), trial.scheme)
    share = share_to_fit(recipe, architecture_of(model), trial.scheme)
    tokens = SHORTER.get(trial.method, 1.0) * subject.tokens
    steps = round((1 - share) * tokens / (subject.rows_at_once * length))
    curve: list[tuple[int, float]] = []
    seen = 0
    if recipe.centre:
        absorb_table_mean(stock_model, model, length)
    if share:
        number = round(share * tokens / (subject.fit_rows * length))
        order = torch.randperm(len(rows["input_ids"]))[: number * subject.fit_rows]
        input_ids = rows["input_ids"][order]
        hf_posenc.fit(stock_model, model, input_ids, projections=True, steps=number, rows=subject.fit_rows)
        seen = number * subject.fit_rows * length
    curve.append((seen, _measured(shortfall, model)))
    looks = {max(round(steps * share), 1) for share in (0.02, 0.04, 0.07, *_evenly(subject.evaluations))}
    for step in _training(model, stock_model, recipe, subject, trial, rows, steps):
        seen += subject.rows_at_once * length
        if step + 1 in looks:
            curve.append((seen, _measured(shortfall, model)))
    return Outcome(trial, curve)


def _evenly(count: int) -> list[float]:
    return [number / count for number in range(1, count + 1)]


def _measured(shortfall: Any, model: Any) -> float:
    model.eval()
    found = shortfall(model)
    model.train()
    return found


def _training(
    model: Any, stock_model: Any, recipe: Recipe, subject: Subject, trial: Trial, rows: Batch, steps: int
) -> Iterator[int]:
    teacher = Teacher(stock_model) if recipe.teacher or not subject.has_head else None
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = parameter_groups(model, trial.rate, recipe.position_rate * trial.rate)
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.98))
    warmup = max(round(WARMUP * steps), 1)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / warmup, 1) * (0.51 + 0.49 * math.cos(math.pi * step / steps))
    )
    model.train()
    for step, batch in zip(range(steps), _batches(rows, subject.rows_at_once, trial.seed), strict=False):
        inside = max(1 - step / (recipe.states_until * steps), 0.0)
        loss = _loss(model, teacher, recipe, batch, inside)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        schedule.step()
        yield step


def _batches(rows: Batch, rows_at_once: int, seed: int) -> Iterator[Batch]:
    generator = torch.Generator().manual_seed(seed)
    count = len(rows["input_ids"])
    for _ in itertools.count():
        for places in torch.randperm(count, generator=generator).split(rows_at_once):
            if len(places) == rows_at_once:
                yield {name: values[places] for name, values in rows.items()}


def _loss(model: Any, teacher: Teacher | None, recipe: Recipe, batch: Batch, inside: float) -> torch.Tensor:
    inputs = {"input_ids": batch["input_ids"]}
    with recorded(layers_of(model)) as states:
        outputs = model(**inputs)
    if "targets" in batch and not recipe.teacher:
        return nn.functional.cross_entropy(
            outputs.logits.flatten(0, 1), batch["targets"].flatten(), ignore_index=IGNORED
        )
    assert teacher is not None
    lesson = teacher.look_at(inputs)
    if not recipe.teacher:  # a model without a head, and nothing but its embeddings to learn from
        found, known = (state.mean(1) for state in (outputs.last_hidden_state, lesson.states[-1]))
        return (1 - nn.functional.cosine_similarity(found, known)).mean()
    weights = recipe.weights
    if "targets" not in batch:
        parts = lesson.parts(dataclasses.replace(weights, predictions=0.0), None, states[1:], None, inside)
        return torch.stack(list(parts.values())).sum()
    asked = batch["targets"] != IGNORED
    divergence = lesson.divergence(outputs.logits, asked)
    return weights.predictions * divergence + weights.states * inside * lesson.distance(states[1:])
