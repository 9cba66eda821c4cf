"""The figure of RECOVERY.md: shortfall over unique tokens."""

from __future__ import annotations

from pathlib import Path

from hf_posenc.plots.style import COLORS, subplots

from .plan import scheme_label
from .results import Results, mean_shortfall
from .subjects import Subject

LOWEST_SHOWN = 1e-3
"""Lower shortfalls are drawn here: the scale is logarithmic, and some are 0."""
MAX_COLUMNS = 3


def drawn_subjects(results: Results, subjects: dict[str, Subject]) -> list[Subject]:
    """The subjects with something to draw: runs of the recipe at one of its budgets."""
    return [
        subject
        for subject in subjects.values()
        if any(results.recipe(subject, scheme, tokens) for scheme, budgets in subject.schemes for tokens in budgets)
    ]


def draw_figure(results: Results, subjects: dict[str, Subject], path: Path) -> None:
    """A panel per subject: lines for the recipe, and crosses of the same color for plain fine-tuning."""
    shown = drawn_subjects(results, subjects)
    if not shown:
        return
    columns = min(MAX_COLUMNS, len(shown))
    rows = -(-len(shown) // columns)
    figure, grid = subplots(rows, columns, 3.6 * columns, 3.0 * rows)
    for axes in grid[len(shown) :]:
        axes.remove()
    for axes, subject in zip(grid, shown, strict=False):
        text = subject.texts[0]
        for index, (scheme, budgets) in enumerate(subject.schemes):
            color, label = COLORS[index % len(COLORS)], scheme_label(scheme).strip("`")
            methods = (("o", "-", results.recipe, budgets), ("x", "", results.naive, subject.naive_budgets))
            for marker, line, find, all_tokens in methods:
                runs = {tokens: outcomes for tokens in all_tokens if (outcomes := find(subject, scheme, tokens))}
                values = [max(mean_shortfall(outcomes, text), LOWEST_SHOWN) for outcomes in runs.values()]
                axes.plot(list(runs), values, color=color, marker=marker, ls=line, label=label if line else None)
        axes.set(xscale="log", yscale="log", xlabel="unique tokens", ylabel="shortfall")
        axes.set_title(f"{subject.name} (circles: recipe, crosses: naive)", fontsize=8)
        axes.legend(fontsize=5)
    figure.savefig(path, dpi=110)
