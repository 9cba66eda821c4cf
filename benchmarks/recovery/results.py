"""Select the runs to report, and read figures off their curves."""

from __future__ import annotations

import json
import math
from itertools import pairwise
from statistics import median
from typing import Any

from .tasks import TASKS, Task
from .trial import Outcome

LEVELS = (0.05, 0.01)
"""Shortfalls that count as recovered: within 5% and within 1% of the original."""
DIVERGED = 1e30
"""Replaces shortfalls that are not finite."""


def best_learning_rate(task: Task, outcomes: list[Outcome], scheme: Any, method: str) -> float:
    """The best rate of the sweep with the first seed; for other schemes, the best over all swept schemes."""
    sweep = [
        outcome
        for outcome in outcomes
        if (outcome.trial.task, outcome.trial.method, outcome.trial.seed) == (task.name, method, 0)
        and outcome.trial.scheme in task.swept_schemes
    ]
    same_scheme = [outcome for outcome in sweep if outcome.trial.scheme == scheme]
    if same_scheme:
        return min(same_scheme, key=final_shortfall).trial.learning_rate
    by_rate: dict[float, list[float]] = {}
    for outcome in sweep:
        by_rate.setdefault(outcome.trial.learning_rate, []).append(final_shortfall(outcome))
    return min(by_rate, key=lambda rate: median(by_rate[rate]), default=task.learning_rates[0])


def final_shortfall(outcome: Outcome) -> float:
    value = outcome.curve[-1][1]
    return value if math.isfinite(value) else math.inf


class Results:
    """The runs with the best learning rate, by task, scheme and method."""

    def __init__(self, outcomes: list[Outcome]) -> None:
        self.cells: dict[tuple[str, str, str], list[Outcome]] = {}
        for outcome in outcomes:
            trial = outcome.trial
            best = best_learning_rate(TASKS[trial.task], outcomes, trial.scheme, trial.method)
            if trial.learning_rate == best:
                self.cells.setdefault((trial.task, str(trial.scheme), trial.method), []).append(outcome)

    def get(self, task: Task, scheme: Any, method: str) -> list[Outcome]:
        return self.cells.get((task.name, str(scheme), method), [])

    def tasks(self) -> list[Task]:
        return [task for name, task in TASKS.items() if any(key[0] == name for key in self.cells)]

    def schemes(self, task: Task) -> list[Any]:
        return [scheme for scheme in task.schemes if (task.name, str(scheme)) in {key[:2] for key in self.cells}]


def tokens_to_reach(outcome: Outcome, level: float) -> float:
    """Tokens until the shortfall falls to a level and stays there, interpolated between measurements."""
    curve = [(tokens, value if math.isfinite(value) else DIVERGED) for tokens, value in outcome.curve]
    reached = math.inf
    for (before, worse), (after, better) in reversed(list(pairwise(curve))):
        if better > level:
            return reached
        reached = float(after)
        if worse > level:
            return before + (after - before) * (worse - level) / (worse - better)
    return float(curve[0][0]) if curve[0][1] <= level else reached


def scheme_label(scheme: Any) -> str:
    return scheme if isinstance(scheme, str) else f"`{json.dumps(scheme)}`"
