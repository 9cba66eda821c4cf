"""Figures of RECOVERY.md: shortfall over tokens, and the tokens that each method needs."""

from __future__ import annotations

import math
from pathlib import Path
from statistics import median
from typing import Any

from hf_posenc.plots.style import COLORS, MARKERS, new_figure, subplots

from .results import LEVELS, Results, scheme_label, tokens_to_reach
from .tasks import Task
from .trial import METHODS, RECOMMENDED_NAME, SHORTER

LOWEST_SHOWN = 1e-3
"""Lower shortfalls are drawn here: the scale is logarithmic, and some are 0."""


def draw_curves(results: Results, path: Path) -> None:
    """Every reported run, with a panel per task and scheme."""
    changes = [(task, scheme) for task in results.tasks() for scheme in results.schemes(task)]
    if not changes:
        return
    columns = min(4, len(changes))
    rows = math.ceil(len(changes) / columns)
    figure, grid = subplots(rows, columns, 3.2 * columns, 2.5 * rows)
    for axes in grid[len(changes) :]:
        axes.remove()
    for axes, (task, scheme) in zip(grid, changes, strict=False):
        for method in METHODS:
            for index, outcome in enumerate(results.get(task, scheme, method)):
                tokens, values = zip(*outcome.curve, strict=True)
                thousands = [count / 1000 for count in tokens]
                shown = [max(value, LOWEST_SHOWN) for value in values]
                axes.plot(thousands, shown, **_line_style(method), lw=1, label=method if index == 0 else None)
        for level in LEVELS:
            axes.axhline(level, color="grey", lw=0.5, ls=":")
        axes.set(yscale="log", xlabel="thousand tokens", ylabel="shortfall")
        axes.set_title(f"{task.name}: {scheme_label(scheme)}", fontsize=8)
    figure.legend(*grid[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize=8)
    figure.savefig(path, dpi=110)


def draw_tokens(results: Results, path: Path) -> None:
    """The median number of tokens to reach each level, with a row per scheme; levels never reached on the right."""
    tasks = results.tasks()
    if not tasks:
        return
    heights = [len(results.schemes(task)) for task in tasks]
    figure = new_figure(9.0, 0.4 * sum(heights) + 1.1 * len(tasks))
    grid = figure.subplots(
        len(tasks), len(LEVELS), squeeze=False, gridspec_kw={"height_ratios": [height + 1 for height in heights]}
    )
    for row, task in zip(grid, tasks, strict=True):
        for axes, level in zip(row, LEVELS, strict=True):
            _draw_level(axes, results, task, level)
    figure.legend(*grid[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize=8)
    figure.savefig(path, dpi=110)


def _draw_level(axes: Any, results: Results, task: Task, level: float) -> None:
    total, schemes = task.tokens / 1000, results.schemes(task)
    never = 1.12 * total
    for method in METHODS:
        points = [
            (min(median(tokens_to_reach(outcome, level) / 1000 for outcome in outcomes), never), index)
            for index, scheme in enumerate(schemes)
            if (outcomes := results.get(task, scheme, method))
        ]
        if points:
            axes.plot(*zip(*points, strict=True), **_marker_style(method), ls="", label=method)
    axes.axvline(1.06 * total, color="grey", lw=0.5)
    ticks = [fraction * total for fraction in (0, 0.25, 0.5, 0.75, 1)]
    axes.set_xticks([*ticks, never], [*(f"{tick:,.0f}" for tick in ticks), "never"], fontsize=7)
    axes.set_yticks(range(len(schemes)), [scheme_label(scheme) for scheme in schemes], fontsize=7)
    axes.set(xlim=(0, 1.18 * total), ylim=(len(schemes) - 0.5, -0.5))
    axes.grid(axis="y", lw=0.3)
    axes.set_title(f"{task.name}: thousand tokens to within {level:.0%}", fontsize=8)


def _line_style(method: str) -> dict[str, Any]:
    """A color per method; the shorter runs of the recommended recipe are dashed lines of its color."""
    if method in SHORTER:
        return {**_line_style(RECOMMENDED_NAME), "ls": (":", "--")[list(SHORTER).index(method)]}
    return {"color": COLORS[list(METHODS).index(method)], "ls": "-"}


def _marker_style(method: str) -> dict[str, Any]:
    """The color of the line; the markers of shorter runs are hollow."""
    marker = MARKERS[list(METHODS).index(method) % len(MARKERS)]
    style = {"color": _line_style(method)["color"], "marker": marker, "ms": 5}
    return {**style, "mfc": "none"} if method in SHORTER else style
