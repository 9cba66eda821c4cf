"""What the page shows: how shortfalls fall with tokens, and the tokens that each method needs."""

from __future__ import annotations

import math
from pathlib import Path
from statistics import median
from typing import Any

from hf_posenc.plots.style import COLORS, MARKERS, new_figure, subplots

from .results import LEVELS, Results, named, tokens_until
from .subjects import Subject
from .trial import METHODS, RECOMMENDED_NAME, SHORTER

LEAST_SHOWN = 1e-3
"""Shortfalls below it are drawn there: the scale is logarithmic, and some are 0."""


def draw_curves(results: Results, path: Path) -> None:
    """Every run that counts, a panel for each change."""
    changes = [(subject, scheme) for subject in results.subjects() for scheme in results.schemes(subject)]
    if not changes:
        return
    columns = min(4, len(changes))
    rows = math.ceil(len(changes) / columns)
    figure, grid = subplots(rows, columns, 3.2 * columns, 2.5 * rows)
    for axes in grid[len(changes) :]:
        axes.remove()
    for axes, (subject, scheme) in zip(grid, changes, strict=False):
        for method in METHODS:
            for place, outcome in enumerate(results.of(subject, scheme, method)):
                tokens, values = zip(*outcome.curve, strict=True)
                thousands = [count / 1000 for count in tokens]
                shown = [max(value, LEAST_SHOWN) for value in values]
                axes.plot(thousands, shown, **_line(method), lw=1, label=method if place == 0 else None)
        for level in LEVELS:
            axes.axhline(level, color="grey", lw=0.5, ls=":")
        axes.set(yscale="log", xlabel="thousand tokens", ylabel="shortfall")
        axes.set_title(f"{subject.name}: {named(scheme)}", fontsize=8)
    figure.legend(*grid[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize=8)
    figure.savefig(path, dpi=110)


def draw_tokens(results: Results, path: Path) -> None:
    """Medians of the tokens until each level, a line for each change; on the right, what is never reached."""
    subjects = results.subjects()
    if not subjects:
        return
    heights = [len(results.schemes(subject)) for subject in subjects]
    figure = new_figure(9.0, 0.4 * sum(heights) + 1.1 * len(subjects))
    grid = figure.subplots(
        len(subjects), len(LEVELS), squeeze=False, gridspec_kw={"height_ratios": [height + 1 for height in heights]}
    )
    for row, subject in zip(grid, subjects, strict=True):
        for axes, level in zip(row, LEVELS, strict=True):
            _draw_level(axes, results, subject, level)
    figure.legend(*grid[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize=8)
    figure.savefig(path, dpi=110)


def _draw_level(axes: Any, results: Results, subject: Subject, level: float) -> None:
    whole, schemes = subject.tokens / 1000, results.schemes(subject)
    never = 1.12 * whole
    for method in METHODS:
        points = [
            (min(median(tokens_until(outcome, level) / 1000 for outcome in found), never), place)
            for place, scheme in enumerate(schemes)
            if (found := results.of(subject, scheme, method))
        ]
        if points:
            axes.plot(*zip(*points, strict=True), **_mark(method), ls="", label=method)
    axes.axvline(1.06 * whole, color="grey", lw=0.5)
    ticks = [share * whole for share in (0, 0.25, 0.5, 0.75, 1)]
    axes.set_xticks([*ticks, never], [*(f"{tick:,.0f}" for tick in ticks), "never"], fontsize=7)
    axes.set_yticks(range(len(schemes)), [named(scheme) for scheme in schemes], fontsize=7)
    axes.set(xlim=(0, 1.18 * whole), ylim=(len(schemes) - 0.5, -0.5))
    axes.grid(axis="y", lw=0.3)
    axes.set_title(f"{subject.name}: thousand tokens until within {level:.0%}", fontsize=8)


def _line(method: str) -> dict[str, Any]:
    """A colour for each method, of the recommended one with fewer tokens the same in dashes."""
    if method in SHORTER:
        return {**_line(RECOMMENDED_NAME), "ls": (":", "--")[list(SHORTER).index(method)]}
    return {"color": COLORS[list(METHODS).index(method)], "ls": "-"}


def _mark(method: str) -> dict[str, Any]:
    """The colour of its line, and a marker of its own; what the recommended one is with fewer tokens is hollow."""
    look = {"color": _line(method)["color"], "marker": MARKERS[list(METHODS).index(method) % len(MARKERS)], "ms": 5}
    return {**look, "mfc": "none"} if method in SHORTER else look
