"""The runs that count, and what is read off them."""

from __future__ import annotations

import json
import math
from itertools import pairwise
from statistics import median
from typing import Any

from .subjects import SUBJECTS, Subject
from .trial import Outcome

LEVELS = (0.05, 0.01)
"""Shortfalls that count as recovered: within 5 % of the original, and within 1 %."""
LARGE = 1e30
"""What stands for a shortfall that is no number."""


def best_rate(subject: Subject, outcomes: list[Outcome], scheme: Any, method: str) -> float:
    """Of the sweep with the first seed; of a scheme without one, what did best on those that have one."""
    swept = [o for o in outcomes if (o.trial.subject, o.trial.method, o.trial.seed) == (subject.name, method, 0)]
    own = [o for o in swept if o.trial.scheme == scheme and scheme in subject.swept]
    if own:
        return min(own, key=end_of).trial.rate
    ends = {
        rate: median(end_of(o) for o in swept if o.trial.rate == rate and o.trial.scheme in subject.swept)
        for rate in {o.trial.rate for o in swept if o.trial.scheme in subject.swept}
    }
    return min(ends, key=lambda rate: ends[rate], default=subject.rates[0])


def end_of(outcome: Outcome) -> float:
    last = outcome.curve[-1][1]
    return last if math.isfinite(last) else math.inf


class Results:
    """The runs that count: those with the best rate of their cell."""

    def __init__(self, outcomes: list[Outcome]) -> None:
        self.cells: dict[tuple[str, str, str], list[Outcome]] = {}
        for outcome in outcomes:
            trial = outcome.trial
            if trial.rate == best_rate(SUBJECTS[trial.subject], outcomes, trial.scheme, trial.method):
                self.cells.setdefault((trial.subject, str(trial.scheme), trial.method), []).append(outcome)

    def of(self, subject: Subject, scheme: Any, method: str) -> list[Outcome]:
        return self.cells.get((subject.name, str(scheme), method), [])

    def subjects(self) -> list[Subject]:
        return [subject for name, subject in SUBJECTS.items() if any(key[0] == name for key in self.cells)]

    def schemes(self, subject: Subject) -> list[Any]:
        return [scheme for scheme in subject.schemes if (subject.name, str(scheme)) in {key[:2] for key in self.cells}]


def tokens_until(outcome: Outcome, level: float) -> float:
    """Until the shortfall is no greater than a level, and stays so; between two measurements, on the line between."""
    curve = [(tokens, value if math.isfinite(value) else LARGE) for tokens, value in outcome.curve]
    reached = math.inf
    for (before, worse), (after, better) in reversed(list(pairwise(curve))):
        if better > level:
            return reached
        reached = float(after)
        if worse > level:
            return before + (after - before) * (worse - level) / (worse - better)
    return float(curve[0][0]) if curve[0][1] <= level else reached


def named(scheme: Any) -> str:
    return scheme if isinstance(scheme, str) else f"`{json.dumps(scheme)}`"
