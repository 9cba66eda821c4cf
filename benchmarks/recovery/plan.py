"""What to run, in which order, and how long it takes."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Iterator
from statistics import median
from types import SimpleNamespace
from typing import Any

from hf_posenc.training import budget_arguments, default_learning_rate

from .subjects import Subject
from .trial import PIECES, Outcome, Trial, recipe_version

SEEDS = (0, 1, 2)
NAIVE_COST, OVERHEAD = 0.5, 5.0
"""The cost of plain fine-tuning relative to the recipe, and the seconds that any run takes besides."""
PHASES = ("recipe", "naive sweep", "naive", "ablation", "recipe sweep", "seeds")


def recipe_trial(subject: Subject, scheme: Any, tokens: int, seed: int = 0, method: str = "recipe") -> Trial:
    """The recipe with the batch size, passes and learning rate that `hf-posenc train --tokens` chooses."""
    chosen = budget_arguments(tokens, subject.length, subject.passes)
    batch_size, passes = chosen["per_device_train_batch_size"], chosen["num_train_epochs"]
    config: Any = SimpleNamespace(hidden_size=subject.hidden_size)
    rate = default_learning_rate(config, batch_size * subject.length)
    return Trial(subject.name, scheme, method, tokens, passes, batch_size, rate, seed)


def naive_grid(subject: Subject, scheme: Any, tokens: int) -> list[Trial]:
    """Plain fine-tuning in every batch size, at every rate, with one pass and as many passes as the recipe."""
    passes = sorted({1, recipe_trial(subject, scheme, tokens).passes})
    return [
        Trial(subject.name, scheme, "naive", tokens, number, batch_size, rate, SEEDS[0])
        for batch_size, rate, number in itertools.product(subject.naive_batches, subject.naive_rates, passes)
    ]


def recipe_grid(subject: Subject, scheme: Any) -> list[Trial]:
    """The recipe at its smallest budget, with other batch sizes and rates than its defaults."""
    default = recipe_trial(subject, scheme, dict(_by_label(subject))[scheme_label(scheme)][0])
    changes = [(1, 0.5), (1, 2.0), (4, 1.0), (4, 2.0)]
    return [
        dataclasses.replace(default, batch_size=rows * default.batch_size, learning_rate=rate * default.learning_rate)
        for rows, rate in changes
    ]


def ablation(subject: Subject, scheme: Any) -> dict[str, Trial]:
    """The recipe in a single pass at its smallest budget, complete and without one of its steps."""
    tokens = dict(_by_label(subject))[scheme_label(scheme)][0]
    methods = {"nothing": "recipe", **{piece: f"without {piece}" for piece in PIECES}}
    return {
        piece: dataclasses.replace(recipe_trial(subject, scheme, tokens, method=method), passes=1)
        for piece, method in methods.items()
    }


def best_naive(subject: Subject, scheme: Any, tokens: int, outcomes: list[Outcome], seed: int = 0) -> Trial | None:
    """The best of the sweep for a scheme, or over all swept schemes for one that was not swept; None before that."""
    swept = scheme if scheme in subject.swept_schemes else None
    names = [swept] if swept is not None else list(subject.swept_schemes)
    scores: dict[tuple[int, int, float], list[float]] = {}
    for outcome in current(outcomes, subject):
        trial = outcome.trial
        if (trial.method, trial.tokens, trial.seed) == ("naive", tokens, SEEDS[0]) and trial.scheme in names:
            settings = (trial.passes, trial.batch_size, trial.learning_rate)
            scores.setdefault(settings, []).append(final_shortfall(outcome, subject.texts[0]))
    complete = {settings: values for settings, values in scores.items() if len(values) == len(names)}
    if len(complete) < len(naive_grid(subject, scheme, tokens)):
        return None
    passes, batch_size, rate = min(complete, key=lambda settings: median(complete[settings]))
    return Trial(subject.name, scheme, "naive", tokens, passes, batch_size, rate, seed)


def planned(subject: Subject, phase: str, outcomes: list[Outcome]) -> Iterator[Trial]:
    """The trials of a phase, whether they were run or not, without those that depend on a sweep to come."""
    if phase == "recipe":
        for scheme, budgets in subject.schemes:
            yield from (recipe_trial(subject, scheme, tokens) for tokens in budgets)
    elif phase == "naive sweep":
        for scheme, tokens in itertools.product(subject.swept_schemes, subject.naive_budgets):
            yield from naive_grid(subject, scheme, tokens)
    elif phase == "ablation":
        for scheme in subject.ablated_schemes:
            yield from ablation(subject, scheme).values()
    elif phase == "recipe sweep":
        for scheme in subject.swept_schemes if subject.rows is not None else ():
            yield from recipe_grid(subject, scheme)
    else:
        for seed in SEEDS[:1] if phase == "naive" else SEEDS[1 : subject.seeds]:
            for scheme, budgets in subject.schemes:
                if phase == "seeds":
                    yield from (recipe_trial(subject, scheme, tokens, seed) for tokens in budgets)
                best = [best_naive(subject, scheme, tokens, outcomes, seed) for tokens in subject.naive_budgets]
                yield from (trial for trial in best if trial is not None)


def current(outcomes: list[Outcome], subject: Subject) -> list[Outcome]:
    """The outcomes of a subject, without those of a recipe with other defaults."""
    version = recipe_version()
    return [outcome for outcome in outcomes if outcome.recipe == version and outcome.trial.subject == subject.name]


def final_shortfall(outcome: Outcome, text: str) -> float:
    value = outcome.shortfalls[text]["trained"]
    return value if value == value else float("inf")


def estimate(subject: Subject, trial: Trial, outcomes: list[Outcome]) -> float:
    """Seconds that a trial takes: as measured for the same method and subject, or else a guess."""
    is_naive = trial.method == "naive"
    factors = [
        outcome.seconds / _guess(subject, outcome.trial)
        for outcome in current(outcomes, subject)
        if (outcome.trial.method == "naive") == is_naive
    ]
    return OVERHEAD + _guess(subject, trial) * (median(factors) if factors else 1.0)


def _guess(subject: Subject, trial: Trial) -> float:
    rows = trial.passes * trial.tokens / subject.length
    seconds = rows * subject.seconds_per_row + rows / trial.batch_size * subject.seconds_per_step
    return seconds * (NAIVE_COST if trial.method == "naive" else 1.0)


def scheme_label(scheme: Any) -> str:
    return scheme if isinstance(scheme, str) else f"`{json.dumps(scheme)}`"


def is_selected(trial: Trial, only: list[str] | None) -> bool:
    """Whether a trial matches one of `subject`, `subject/scheme type` or `subject/scheme as JSON`."""
    scheme_type = trial.scheme if isinstance(trial.scheme, str) else trial.scheme["type"]
    names = {scheme_type, scheme_label(trial.scheme).strip("`")}
    return not only or any(
        subject == trial.subject and (not scheme or scheme in names)
        for subject, _, scheme in (selection.partition("/") for selection in only)
    )


def _by_label(subject: Subject) -> list[tuple[str, tuple[int, ...]]]:
    return [(scheme_label(scheme), budgets) for scheme, budgets in subject.schemes]
