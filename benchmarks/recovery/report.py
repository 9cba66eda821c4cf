"""Render the results as RECOVERY.md, with a figure."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .figures import draw_figure, drawn_subjects
from .plan import PHASES, ablation, best_naive, naive_grid, planned, recipe_grid, recipe_trial, scheme_label
from .results import Results, mean_shortfall
from .subjects import SUBJECTS, Subject
from .targets import NOT_RUN, target_rows
from .trial import PIECES, Outcome, Trial, recipe_version

FIGURE = "recovery.png"
INTRODUCTION = """# Recovery after a change of encoding

Generated from recovery/results.json by `make bench-recovery`; do not edit.

How much training does a converted checkpoint need to be as good as before? The shortfall is its distance from the
original as a fraction, so 0 is full recovery. All shortfalls are on held-out text. *Own* text was sampled from the
original; it flatters, because it contains only what the original expects. *Real* text was not.

- recipe: `hf-posenc train --tokens N`, which chooses the rows per step, the passes over the rows and the learning rate.
- naive: swap the encoding, then fine-tune on text. It uses the best of several batch sizes, learning rates and numbers
  of passes, chosen with one seed for each budget; schemes that were not swept use what was best on those that were.

Unique tokens are those of the text, seen tokens count a row as often as it was used. Seconds are elapsed ones, with one
core (SmolLM2: two), on a machine that was busy at times, without evaluation. Cells are means over seeds, with their
range.
{progress}
Results of a recipe with other defaults are left out; this page is about version {version}. An
[earlier recipe](EARLIER_RECIPE.md) has a page of its own.
"""


def render_page(outcomes: list[Outcome], figure_directory: str, subjects: dict[str, Subject] | None = None) -> str:
    """The page in Markdown, with a link to the figure in a directory next to it."""
    subjects = subjects or SUBJECTS
    results = Results(outcomes, subjects)
    trials = [
        trial
        for subject in subjects.values()
        for phase in PHASES
        for trial in planned(subject, phase, results.outcomes)
    ]
    done = sum(results.get(trial) is not None for trial in trials)
    progress = f'Of {len(trials)} planned runs, {done} are done; the others say "{NOT_RUN}".'
    lines = INTRODUCTION.format(progress=progress, version=recipe_version()).splitlines()
    lines += ["", "## Targets", "", "On the first of the texts named below.", ""]
    lines += _table(["change", "unique tokens", "target", "measured", ""], target_rows(results, subjects))
    if drawn_subjects(results, subjects):
        lines += ["", f"![Shortfall over unique tokens]({figure_directory}{FIGURE})"]
    for subject in subjects.values():
        lines += ["", f"## {subject.name}", "", subject.about, "", *_subject_table(results, subject)]
        lines += _ablation(results, subject) + _sweep(results, subject) + _answers(results, subject)
    return "\n".join(lines) + "\n"


def write(outcomes: list[Outcome], page: Path, figure_directory: Path) -> None:
    """Write the page and its figure."""
    draw_figure(Results(outcomes, SUBJECTS), SUBJECTS, figure_directory / FIGURE)
    relative = figure_directory.relative_to(page.parent).as_posix()
    page.write_text(render_page(outcomes, "" if relative == "." else f"{relative}/"), encoding="utf-8")


def _table(titles: list[str], rows: list[list[str]]) -> list[str]:
    return [f"| {' | '.join(cells)} |" for cells in (titles, ["---"] * len(titles), *rows)]


def shortfall_cell(outcomes: list[Outcome], text: str, stage: str = "trained") -> str:
    """The mean, and the range if seeds differ; empty for stages that the runs do not have."""
    if not outcomes:
        return NOT_RUN
    values = [outcome.shortfalls[text][stage] for outcome in outcomes if stage in outcome.shortfalls[text]]
    if not values:
        return ""
    spread = f" ({min(values):.3f} to {max(values):.3f})" if min(values) < max(values) else ""
    return f"{mean_shortfall(outcomes, text, stage):.3f}{spread}"


def _subject_table(results: Results, subject: Subject) -> list[str]:
    titles = ["scheme", "method", "unique", "seen", "rows per step", "rate", "swapped", "started"]
    rows = []
    for scheme, budgets in subject.schemes:
        trials = [("recipe", tokens, recipe_trial(subject, scheme, tokens)) for tokens in budgets]
        for tokens in subject.naive_budgets:
            trials.append(("naive", tokens, best_naive(subject, scheme, tokens, results.outcomes)))
        rows += [[scheme_label(scheme), *_run_cells(results, subject, *trial)] for trial in trials]
    return _table([*titles, *subject.texts, "seconds"], rows)


def _run_cells(results: Results, subject: Subject, method: str, tokens: int, trial: Trial | None) -> list[str]:
    outcomes = results.seeds(trial, subject.seeds)
    if trial is None or not outcomes:
        return [method, f"{tokens:,}", *[""] * 5, *[NOT_RUN] * len(subject.texts), ""]
    first, text = outcomes[0], subject.texts[0]
    seconds = sum(outcome.seconds for outcome in outcomes) / len(outcomes)
    sizes = [f"{first.tokens_unique:,}", f"{first.tokens_seen:,}", str(trial.batch_size), f"{trial.learning_rate:.2g}"]
    stages = [shortfall_cell(outcomes, text, stage) for stage in ("swapped", "started")]
    return [method, *sizes, *stages, *(shortfall_cell(outcomes, text) for text in subject.texts), f"{seconds:.0f}"]


def _ablation(results: Results, subject: Subject) -> list[str]:
    if not subject.ablated_schemes:
        return []
    titles = ["without", *map(scheme_label, subject.ablated_schemes)]
    trials = {str(scheme): ablation(subject, scheme) for scheme in subject.ablated_schemes}
    rows = []
    for piece in ("nothing", *PIECES):
        runs = [results.get(by_piece[piece]) for by_piece in trials.values()]
        rows.append([piece, *(_single(run, subject) for run in runs)])
    text = "The recipe without one of its steps, with the smallest budget in a single pass:"
    return ["", text, "", *_table(titles, rows)]


def _sweep(results: Results, subject: Subject) -> list[str]:
    """Every batch size, rate and number of passes that was tried."""
    rows: list[list[str]] = []
    for scheme in subject.swept_schemes:
        smallest = next(budgets for other, budgets in subject.schemes if other == scheme)[0]
        grid = [recipe_trial(subject, scheme, smallest), *(recipe_grid(subject, scheme) if subject.rows else [])]
        for tokens in subject.naive_budgets:
            grid += naive_grid(subject, scheme, tokens)
        for trial in grid:
            run = results.get(trial)
            if run is not None:
                settings = [f"{trial.tokens:,}", trial.passes, trial.batch_size, f"{trial.learning_rate:.2g}"]
                rows.append([scheme_label(scheme), trial.method, *map(str, settings), _single(run, subject)])
    if not rows:
        return ["", f"Batch sizes, rates and passes: {NOT_RUN}."]
    titles = ["scheme", "method", "unique", "passes", "rows per step", "rate", subject.texts[0]]
    summary = f"Batch sizes, rates and passes that were tried ({len(rows)} runs)"
    return ["", f"<details><summary>{summary}</summary>", "", *_table(titles, rows), "", "</details>"]


def _answers(results: Results, subject: Subject) -> list[str]:
    """What a chat model answers after a run."""
    runs = [run for run in results.outcomes if run.trial.subject == subject.name and "answer" in run.notes]
    if not runs:
        return []
    rows = [_answer_row(run) for run in runs]
    titles = ["scheme", "method", "unique", "largest gradient norm / running median", "answer"]
    return ["", "The capital of France, by greedy decoding:", "", *_table(titles, rows)]


def _answer_row(run: Outcome) -> list[str]:
    trial, spike = run.trial, run.notes.get("gradient_spike")
    answer: Any = run.notes["answer"].strip().splitlines() or [""]
    cells = [scheme_label(trial.scheme), trial.method, f"{run.tokens_unique:,}"]
    return [*cells, "" if spike is None else f"{spike:.1f}", answer[0].replace("|", "/")]


def _single(run: Outcome | None, subject: Subject) -> str:
    return NOT_RUN if run is None else f"{run.shortfalls[subject.texts[0]]['trained']:.3f}"
