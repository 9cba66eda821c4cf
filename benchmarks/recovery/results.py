"""The results file, and what is read off it."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from statistics import fmean
from typing import Any

from .plan import best_naive, current, recipe_trial
from .subjects import Subject
from .trial import Outcome, Trial

RESULTS = Path(__file__).parent / "results.json"


def read_outcomes(path: Path = RESULTS) -> list[Outcome]:
    """All outcomes in the file; none if it does not exist."""
    if not path.is_file():
        return []
    entries = json.loads(path.read_text(encoding="utf-8"))
    return [Outcome(**{**entry, "trial": Trial(**entry["trial"])}) for entry in entries]


def write_outcomes(outcomes: list[Outcome], path: Path = RESULTS) -> None:
    """Replace the file by one that is complete at any time, with a line per outcome."""
    entries = [dataclasses.asdict(outcome) for outcome in sorted(outcomes, key=lambda outcome: outcome.trial.key)]
    temporary = path.with_suffix(".new")
    temporary.write_text("[\n" + ",\n".join(map(json.dumps, entries)) + "\n]\n", encoding="utf-8")
    temporary.replace(path)


class Results:
    """The outcomes of the current recipe, by what was run."""

    def __init__(self, outcomes: list[Outcome], subjects: dict[str, Subject]) -> None:
        self.outcomes = [outcome for subject in subjects.values() for outcome in current(outcomes, subject)]
        self.num_earlier = len(outcomes) - len(self.outcomes)
        self._by_key = {outcome.trial.key: outcome for outcome in self.outcomes}

    def get(self, trial: Trial) -> Outcome | None:
        return self._by_key.get(trial.key)

    def seeds(self, trial: Trial | None, count: int) -> list[Outcome]:
        """The outcomes of a trial with every seed that was run."""
        trials = [] if trial is None else [dataclasses.replace(trial, seed=seed) for seed in range(count)]
        return [outcome for outcome in map(self.get, trials) if outcome is not None]

    def recipe(self, subject: Subject, scheme: Any, tokens: int) -> list[Outcome]:
        return self.seeds(recipe_trial(subject, scheme, tokens), subject.seeds)

    def naive(self, subject: Subject, scheme: Any, tokens: int) -> list[Outcome]:
        return self.seeds(best_naive(subject, scheme, tokens, self.outcomes), subject.seeds)

    def fraction_needed(self, subject: Subject, scheme: Any) -> float | None:
        """Unique tokens with which the recipe matches plain fine-tuning, relative to those of the latter.

        Whole runs are compared, so this is an upper bound. None if something was not run; infinite if no budget of the
        recipe is enough.
        """
        tokens, text = subject.naive_budgets[-1], subject.texts[0]
        naive = self.naive(subject, scheme, tokens)
        budgets = {budget: self.recipe(subject, scheme, budget) for budget in dict(_pairs(subject))[str(scheme)]}
        if not naive or not any(budgets.values()):
            return None
        level = max(mean_shortfall(naive, text), 0.0)
        enough = [budget for budget, runs in budgets.items() if runs and mean_shortfall(runs, text) <= level]
        return min(enough) / tokens if enough else float("inf")


def mean_shortfall(outcomes: list[Outcome], text: str, stage: str = "trained") -> float:
    return fmean(outcome.shortfalls[text][stage] for outcome in outcomes)


def _pairs(subject: Subject) -> list[tuple[str, tuple[int, ...]]]:
    return [(str(scheme), budgets) for scheme, budgets in subject.schemes]
