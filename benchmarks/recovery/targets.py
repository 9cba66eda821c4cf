"""The targets of the benchmark: what the recipe should reach, and whether it does."""

from __future__ import annotations

import dataclasses
import math
from statistics import median
from typing import Any

from .plan import scheme_label
from .results import Results, mean_shortfall
from .subjects import ALIBI_PER_LAYER, NONE_IN_SOME_LAYERS, T5_PER_LAYER, Subject

TARGET_FRACTION, MAX_GRADIENT_SPIKE, ANSWER = 0.15, 20.0, "Paris"
ORDERED_SCHEMES = (
    *("sinusoidal", "polynomial", "exponential", "rope", "xpos", "cope", "shaw", "transformer_xl", "deberta", "tupe"),
)
"""Schemes that see more of the order than distances."""


@dataclasses.dataclass(frozen=True)
class Target:
    """The largest shortfall that a change may end with, given this many unique tokens."""

    subject: str
    scheme: Any
    tokens: int
    shortfall: float


TARGETS = (
    Target("stories260k", "t5", 30_000, 0.20),
    Target("stories260k", "kerple", 30_000, 0.30),
    Target("stories260k", T5_PER_LAYER, 75_000, 0.08),
    Target("stories260k", T5_PER_LAYER, 600_000, 0.03),
    Target("stories260k", "alibi", 300_000, 0.22),
    Target("stories260k", ALIBI_PER_LAYER, 300_000, 0.08),
    *(Target("MiniLM", scheme, 40_000, 0.04) for scheme in ("rope", "alibi", "t5", "deberta")),
    *(Target("gpt-nano-sort", scheme, 100_000, 0.02) for scheme in ORDERED_SCHEMES),
    Target("SmolLM2", NONE_IN_SOME_LAYERS, 100_000, 0.05),
    Target("SmolLM2", T5_PER_LAYER, 200_000, 0.20),
    Target("SmolLM2", ALIBI_PER_LAYER, 200_000, 0.40),
)
NOT_RUN = "not yet run"


def target_rows(results: Results, subjects: dict[str, Subject]) -> list[list[str]]:
    """A row for each target: change, unique tokens, target, measured, met or not."""
    rows = [_shortfall_row(results, subjects[target.subject], target) for target in TARGETS]
    answers = [answer for scheme, answer in _notes(results, "answer") if scheme == NONE_IN_SOME_LAYERS]
    answer = next(iter(answers[0].strip().splitlines()), "") if answers else NOT_RUN
    question = f"SmolLM2 to {scheme_label(NONE_IN_SOME_LAYERS)}: capital of France"
    rows.append([question, "", ANSWER, answer, _met(ANSWER in answer) if answers else ""])
    spikes = [spike for _, spike in _notes(results, "gradient_spike") if spike is not None]
    measured, met = (f"{max(spikes):.1f}", _met(max(spikes) <= MAX_GRADIENT_SPIKE)) if spikes else (NOT_RUN, "")
    rows.append(["SmolLM2: largest gradient norm / running median", "", f"<= {MAX_GRADIENT_SPIKE:g}", measured, met])
    return [*rows, _fraction_row(results, subjects)]


def _shortfall_row(results: Results, subject: Subject, target: Target) -> list[str]:
    """With the largest budget that was run and is not above the target's."""
    budgets = next(budgets for scheme, budgets in subject.schemes if scheme == target.scheme)
    change = f"{subject.name} to {scheme_label(target.scheme)}"
    for tokens in sorted((tokens for tokens in budgets if tokens <= target.tokens), reverse=True):
        outcomes = results.recipe(subject, target.scheme, tokens)
        if outcomes:
            value = mean_shortfall(outcomes, subject.texts[0])
            measured = f"{value:.3f}" + (f" with {tokens:,}" if tokens < target.tokens else "")
            return [
                change,
                f"{target.tokens:,}",
                f"<= {target.shortfall:.2f}",
                measured,
                _met(value <= target.shortfall) if tokens == target.tokens or value <= target.shortfall else NOT_RUN,
            ]
    return [change, f"{target.tokens:,}", f"<= {target.shortfall:.2f}", NOT_RUN, ""]


def _fraction_row(results: Results, subjects: dict[str, Subject]) -> list[str]:
    pairs = [(subject, scheme) for subject in subjects.values() for scheme, _ in subject.schemes]
    fractions = [results.fraction_needed(*pair) for pair in pairs]
    known = [fraction for fraction in fractions if fraction is not None]
    change = f"Unique tokens to match plain fine-tuning, median over {len(known)} of {len(pairs)} changes"
    if not known:
        return [change, "", f"<= {TARGET_FRACTION}", NOT_RUN, ""]
    value = median(known)
    measured = f"{value:.3f}" if math.isfinite(value) else "not reached"
    return [change, "", f"<= {TARGET_FRACTION}", measured, _met(value <= TARGET_FRACTION)]


def _notes(results: Results, name: str) -> list[tuple[Any, Any]]:
    """What runs of the recipe noted on SmolLM2, with their schemes, the largest budgets first."""
    runs = [outcome for outcome in results.outcomes if outcome.trial.method == "recipe" and name in outcome.notes]
    runs.sort(key=lambda outcome: -outcome.trial.tokens)
    return [(outcome.trial.scheme, outcome.notes[name]) for outcome in runs]


def _met(is_met: bool) -> str:
    return "met" if is_met else "missed"
