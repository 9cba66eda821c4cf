"""Outcomes as a page of tables and a picture of the curves."""

from __future__ import annotations

import math
from pathlib import Path
from statistics import median
from typing import Any

from hf_posenc.training.recipe import FIT_SHARE

from . import pictures
from .results import LEVELS, Results, end_of, named, tokens_until
from .subjects import Subject
from .trial import METHODS, RECOMMENDED_NAME, SHORTER, Outcome

RECOMMENDED, NAIVE = RECOMMENDED_NAME, "naive"
FIRST = (NAIVE, RECOMMENDED, *SHORTER)
AIMS = {"stories260k": 0.02, "gpt-nano-sort": 0.02, "MiniLM": 0.03}
"""Shortfalls that the recommended recipe is meant to end at, at most."""
LEAST_SHARE = 0.1
"""Of the tokens of plain fine-tuning, that it is meant to need at most, in the median."""
MEASURES = {
    "stories260k": "perplexity on text of the model's own, above the original's",
    "gpt-nano-sort": "share of all 729 inputs that are not sorted exactly, of those that the original sorts",
    "MiniLM": "1 - mean cosine to the original's sentence embeddings, on held-out text",
}
PICTURES = (
    ("tokens until within 5% and 1%", "tokens.png", pictures.draw_tokens),
    ("shortfall over tokens", "recovery.png", pictures.draw_curves),
)
HEAD = """# Recovery

Written by `make bench-recovery`; do not edit. How much training a converted checkpoint needs until it is as good as it
was. The shortfall is what is missing to the original, as a share: {measures}. "Longer" is the
same with more tokens, for the recommended recipe alone.

Every method sees the same rows in batches of the same size, and as many tokens, those that attention is fitted on among
them. Each has the best of the same learning rates, found with one seed on {swept}; the other schemes take the rate
that did best on those. Figures are medians of three seeds with the least and the greatest; where there is no spread, it
was one seed.

- naive: the encoding is changed at once, then fine-tuning on the text (MiniLM, which has no head: on the cosine of its
  embeddings with the original's)
- teacher: learning from the original's predictions and from the states behind each layer, instead of from the text
- fit: before anything else, {share:.0%} of the tokens go into fitting each layer's attention to the old encoding's
- handover: the old encoding fades out over the first half
- {recommended}: what `train` does. Attention is fitted where the old encoding is a rotation (stories260k), or the new
  one is one or depends on the content; the mean of BERT's table is kept; then there is a teacher, whose states fade
  from the loss; and the scheme's own parameters learn at {rate:g} times the rate of the others. (Other than there,
  only predictions of digits that are asked for count.)
"""


def write(outcomes: list[Outcome], page: Path, beside: Path) -> None:
    """The page, and its pictures in a directory."""
    results = Results(outcomes)
    lines = HEAD.format(
        measures="; ".join(f"{name}: {text}" for name, text in MEASURES.items()),
        swept="; ".join(
            f"{', '.join(map(named, s.swept))} ({s.name})" for s in results.subjects() if s.methods is None
        ),
        share=FIT_SHARE,
        recommended=RECOMMENDED,
        rate=METHODS[RECOMMENDED].position_rate,
    ).splitlines()
    for subject in results.subjects():
        lines += ["", f"## {subject.name}", "", f"{subject.tokens:,} tokens in batches of {subject.rows_at_once} rows."]
        lines += _table(results, subject, "Shortfall at the end", _at_the_end)
        for level in LEVELS:
            lines += _table(results, subject, f"Thousand tokens until within {level:.0%}", _until(level))
    lines += _saved(results)
    lines += _aims(results)
    for text, name, draw in PICTURES:
        draw(results, beside / name)
        lines += ["", f"![{text}]({(beside / name).relative_to(page.parent)})"]
    page.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _table(results: Results, subject: Subject, title: str, cell: Any) -> list[str]:
    schemes = results.schemes(subject)
    lines = ["", f"### {title}", "", "| | " + " | ".join(named(scheme) for scheme in schemes) + " |"]
    lines.append("| --- |" + " --- |" * len(schemes))
    for method in METHODS:
        cells = [cell(results.of(subject, scheme, method)) for scheme in schemes]
        if any(cells):
            lines.append(f"| {method} | " + " | ".join(cells) + " |")
    return lines


def _at_the_end(found: list[Outcome]) -> str:
    ends = [end_of(outcome) for outcome in found]
    return f"{median(ends):.3f}{_spread(ends, '.3f')}" if ends else ""


def _until(level: float) -> Any:
    def cell(found: list[Outcome]) -> str:
        tokens = [tokens_until(outcome, level) / 1000 for outcome in found]
        if not tokens:
            return ""
        return f"{median(tokens):.0f}{_spread(tokens, '.0f')}" if math.isfinite(median(tokens)) else "not reached"

    return cell


def _spread(values: list[float], form: str) -> str:
    return f" ({min(values):{form}} to {max(values):{form}})" if len(values) > 1 else ""


def _saved(results: Results) -> list[str]:
    """What the recommended recipe needs of the tokens of plain fine-tuning, to be as good as that is at its end."""
    lines = ["", f"## {RECOMMENDED} beside {NAIVE}", ""]
    lines += ["Tokens until it is as good as plain fine-tuning is at its end, as a share of those: in the run with all"]
    lines += ["tokens, whose rate falls to the end of them, or at the end of a run with fewer, if that is less.", ""]
    lines += ["| checkpoint | scheme | share |", "| --- | --- | --- |"]
    shares = []
    for subject in results.subjects():
        for scheme in results.schemes(subject):
            share = _share_needed(results, subject, scheme)
            if share is not None:
                shares.append(share)
                told = f"{share:.3f}" if math.isfinite(share) else "not reached"
                lines.append(f"| {subject.name} | {named(scheme)} | {told} |")
    if shares:
        met = "met" if median(shares) <= LEAST_SHARE else "not met"
        lines += ["", f"Median over {len(shares)}: {median(shares):.3f} (aim: at most {LEAST_SHARE}, {met})."]
    return lines


def _share_needed(results: Results, subject: Subject, scheme: Any) -> float | None:
    plain, ours = (results.of(subject, scheme, method) for method in (NAIVE, RECOMMENDED))
    if not plain or not ours:
        return None
    level = max(median(map(end_of, plain)), 0.0)
    tokens = min(outcome.curve[-1][0] for outcome in plain)
    enough = [
        share
        for method, share in SHORTER.items()
        if (found := results.of(subject, scheme, method)) and median(map(end_of, found)) <= level
    ]
    return min([median(tokens_until(outcome, level) for outcome in ours) / tokens, *enough])


def _aims(results: Results) -> list[str]:
    lines = ["", "## Aims", "", "Where the recommended recipe is meant to end, after as many tokens as it likes.", ""]
    lines += ["| checkpoint | aim: shortfall at most | reached | not reached |", "| --- | --- | --- | --- |"]
    for subject in results.subjects():
        aim = AIMS[subject.name.split(",")[0]]
        ends = {
            named(scheme): median(map(end_of, found))
            for scheme in results.schemes(subject)
            if (found := results.of(subject, scheme, RECOMMENDED))
        }
        reached, not_reached = (
            ", ".join(f"{name} {end:.3f}" for name, end in ends.items() if (end <= aim) == met) for met in (True, False)
        )
        lines.append(f"| {subject.name} ({subject.tokens:,} tokens) | {aim} | {reached} | {not_reached} |")
    return lines
