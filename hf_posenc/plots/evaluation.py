"""Figures of an evaluation. Every function takes an `EvaluationReport` and returns a matplotlib figure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import PosEncError
from . import style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from ..evaluation import Estimate, EvaluationReport, Result


def length_curve_figure(report: EvaluationReport) -> Figure:
    """Perplexity by window length, with confidence intervals. A cross marks where a model stops."""
    figure, axes = _draw_by_length(report, report.perplexity, "perplexity", mark_stops=True)
    _use_log_scale(axes)
    return figure


def position_figure(report: EvaluationReport) -> Figure:
    """Perplexity by position within windows of the longest length that any model reaches."""
    length = max((result.length for result in report.perplexity if result.positions), default=0)
    figure, axes = _line_axes(report)
    for result in report.perplexity:
        if result.length == length:
            points = [((bin_.start + bin_.end) / 2, bin_.perplexity) for bin_ in result.positions]
            _draw_line(axes, points, result.model, report.models.index(result.model))
    axes.set(xlabel=f"position in a window of {length:,} tokens")
    _use_log_scale(axes)
    if report.trained_length is not None and length > report.trained_length:
        _mark_trained_length(axes, report.trained_length)
    style.legend_outside(figure, axes)
    return figure


def passkey_figure(report: EvaluationReport, value: str = "accuracy") -> Figure:
    """A heat map per model of passkey "accuracy" or "preference": length across, depth down."""
    if value not in ("accuracy", "preference"):
        raise PosEncError(f"Unknown value {value!r}; expected accuracy or preference")
    figure, grid = style.panel_grid(len(report.models), 3.6 if len(report.models) == 1 else 3.0)
    lengths = sorted({result.length for result in report.passkey})
    depths = sorted({cell.depth for result in report.passkey for cell in result.depths})
    image = None
    for axes, model in zip(grid, report.models, strict=True):
        heat = [[float("nan")] * len(lengths) for _ in depths]
        for result in (result for result in report.passkey if result.model == model):
            column = lengths.index(result.length)
            for cell in result.depths:
                heat[depths.index(cell.depth)][column] = getattr(cell, value).value
            if result.stopped:
                limit = result.stopped.max_length
                text = "not measured" if limit is None else f"stops at {limit:,}"
                axes.text(column, (len(depths) - 1) / 2, text, ha="center", va="center", rotation=90, fontsize=8)
        if depths:
            image = axes.imshow(heat, vmin=0, vmax=1, cmap=style.SEQUENTIAL_CMAP, aspect="auto")
        axes.set(title=model, xlabel="length (tokens)", ylabel="depth of the passkey")
        axes.set_xticks(range(len(lengths)), [f"{length:,}" for length in lengths], rotation=45)
        axes.set_yticks(range(len(depths)), [f"{depth:.0%}" for depth in depths])
    if image is not None:
        label = "accuracy" if value == "accuracy" else "passkey preferred to a random one\n(0.5 is chance)"
        figure.colorbar(image, ax=grid, label=label)
    return figure


def order_figure(report: EvaluationReport) -> Figure:
    """Loss increase when the context is shuffled, by block size, at the longest length that each model reaches."""
    figure, axes = _line_axes(report)
    block_sizes: list[int | None] = []
    for number, model in enumerate(report.models):
        results = [result for result in report.order if result.model == model and result.shuffles]
        if results:
            longest = max(results, key=lambda result: result.length)
            block_sizes = [cell.block_size for cell in longest.shuffles]
            points = [(index, cell.loss_increase) for index, cell in enumerate(longest.shuffles)]
            _draw_line(axes, points, f"{model}\n{longest.length:,} tokens", number)
    axes.axhline(0, color="0.6", linewidth=0.8)
    axes.set_xticks(range(len(block_sizes)), ["window" if size is None else str(size) for size in block_sizes])
    axes.set(xlabel="size of shuffled blocks (tokens)", ylabel="loss increase (nats per token)")
    style.legend_outside(figure, axes)
    return figure


def similarity_figure(report: EvaluationReport) -> Figure:
    """Cosine similarity to the reference model's embeddings by length, with confidence intervals."""
    figure, axes = _draw_by_length(report, report.similarity, "cosine")
    references = sorted({result.reference for result in report.similarity if result.reference})
    axes.set(ylabel=f"cosine similarity to {', '.join(references) or 'the reference'}")
    return figure


FIGURES: dict[str, tuple[str, Callable[[EvaluationReport], Figure]]] = {
    "length_curve": ("perplexity", length_curve_figure),
    "positions": ("perplexity", position_figure),
    "passkey": ("passkey", passkey_figure),
    "passkey_preference": ("passkey", partial(passkey_figure, value="preference")),
    "order": ("order", order_figure),
    "similarity": ("similarity", similarity_figure),
}
"""File name -> the metric that it shows, and what draws it."""


def save_evaluation_figures(report: EvaluationReport, directory: str | Path) -> list[Path]:
    """Write PNG files for the metrics in the report and return the paths."""
    return [
        style.save_figure(draw(report), Path(directory) / f"{name}.png")
        for name, (metric, draw) in FIGURES.items()
        if getattr(report, metric)
    ]


def _line_axes(report: EvaluationReport) -> tuple[Figure, Axes]:
    """Axes high enough for a legend with all models."""
    figure, (axes,) = style.subplots(1, 1, 6.4, max(3.8, 2 + 0.22 * len(report.models)))
    return figure, axes


def _draw_line(axes: Axes, points: Sequence[tuple[float, Estimate]], label: str, number: int) -> None:
    values = [estimate.value for _, estimate in points]
    marker, line_style = style.marker(number), style.line_style(number)
    axes.plot([x for x, _ in points], values, label=label, marker=marker, markersize=5, **line_style)
    bounds = [(x, *estimate.confidence_interval) for x, estimate in points if estimate.confidence_interval]
    lows, highs = [low for _, low, _ in bounds], [high for _, _, high in bounds]
    axes.fill_between([x for x, _, _ in bounds], lows, highs, color=style.color(number), alpha=0.2, linewidth=0)


def _draw_by_length(
    report: EvaluationReport, results: Sequence[Result], quantity: str, mark_stops: bool = False
) -> tuple[Figure, Axes]:
    """A line per model, with the longest input that it accepts in the legend."""
    figure, axes = _line_axes(report)
    for number, model in enumerate(report.models):
        of_model = [result for result in results if result.model == model]
        points = [(result.length, getattr(result, quantity)) for result in of_model if result.stopped is None]
        stops = [result.stopped for result in of_model if result.stopped]
        limits = [stopped.max_length for stopped in stops if stopped.max_length]
        _draw_line(axes, points, f"{model}\n(stops at {min(limits):,})" if limits else model, number)
        if mark_stops and points and stops:
            length, estimate = points[-1]
            axes.plot([length], [estimate.value], "x", color=style.color(number), markersize=12, markeredgewidth=2.5)
    lengths = sorted({result.length for result in results})
    axes.set(xscale="log", xlabel="window length (tokens)")
    axes.set_xticks(lengths, [f"{length:,}" for length in lengths])
    axes.xaxis.minorticks_off()
    if report.trained_length is not None:
        _mark_trained_length(axes, report.trained_length)
    style.legend_outside(figure, axes)
    return figure, axes


def _use_log_scale(axes: Axes) -> None:
    """Write perplexities as 200 instead of 2 x 10^2, and label values between powers of ten where there is room."""
    from matplotlib.ticker import LogFormatter

    axes.set(yscale="log", ylabel="perplexity")
    for set_formatter in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
        set_formatter(LogFormatter(minor_thresholds=(1.5, 0.6)))


def _mark_trained_length(axes: Axes, trained_length: int) -> None:
    axes.axvline(trained_length, color="0.4", linestyle=":", linewidth=1)
    axes.annotate(
        "trained length", (trained_length, 0), xycoords=("data", "axes fraction"), fontsize=8, color="0.4",
        xytext=(3, 4), textcoords="offset points", rotation=90,
    )  # fmt: skip
