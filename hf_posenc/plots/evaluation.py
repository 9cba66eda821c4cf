"""Figures of an evaluation. Every function takes an `EvaluationReport` and returns a matplotlib figure."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import PosEncError
from .style import (
    MARKERS,
    SEQUENTIAL_CMAP,
    color,
    create_figure_directory,
    legend_outside,
    line_style,
    save_figure,
    subplots,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from ..evaluation import Estimate, EvaluationReport, Result


def length_curve_figure(report: EvaluationReport) -> Figure:
    """Perplexity by window length, with confidence intervals. A cross marks where a model stops."""
    figure, axes = _line_axes(report)
    for number, model in enumerate(report.models):
        results = [result for result in report.perplexity if result.model == model]
        points = [(result.length, result.perplexity) for result in results if result.perplexity is not None]
        _draw_line(axes, points, _label(model, results), number)
        if points and any(result.stopped for result in results):
            length, estimate = points[-1]
            axes.plot([length], [estimate.value], "x", color=color(number), markersize=12, markeredgewidth=2.5)
    axes.set(yscale="log", ylabel="perplexity")
    _format_length_axis(axes, report, report.perplexity)
    _format_log_axis(axes)
    legend_outside(figure, axes)
    return figure


def position_figure(report: EvaluationReport, length: int | None = None) -> Figure:
    """Perplexity by position within windows of one length; by default the longest that any model reaches."""
    evaluated = [result for result in report.perplexity if result.positions]
    if length is None and evaluated:
        length = max(result.length for result in evaluated)
    figure, axes = _line_axes(report)
    for result in evaluated:
        if result.length == length:
            points = [((bin_.start + bin_.end) / 2, bin_.perplexity) for bin_ in result.positions]
            _draw_line(axes, points, result.model, report.models.index(result.model))
    axes.set(yscale="log", xlabel=f"position in a window of {length or 0:,} tokens", ylabel="perplexity")
    if length is not None and length > (report.trained_length or length):
        _mark_trained_length(axes, report)
    _format_log_axis(axes)
    legend_outside(figure, axes)
    return figure


def passkey_figure(report: EvaluationReport, value: str = "accuracy") -> Figure:
    """A heat map per model of passkey "accuracy" or "preference": length across, depth down."""
    if value not in ("accuracy", "preference"):
        raise PosEncError(f"Unknown value {value!r}; expected accuracy or preference")
    figure, grid = subplots(1, len(report.models), 1.2 + 3.0 * len(report.models), 3.6)
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
            image = axes.imshow(heat, vmin=0, vmax=1, cmap=SEQUENTIAL_CMAP, aspect="auto")
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
    legend_outside(figure, axes)
    return figure


def similarity_figure(report: EvaluationReport) -> Figure:
    """Cosine similarity to the reference model's embeddings by length, with confidence intervals."""
    figure, axes = _line_axes(report)
    references = sorted({result.reference for result in report.similarity if result.reference})
    for number, model in enumerate(report.models):
        results = [result for result in report.similarity if result.model == model]
        points = [(result.length, result.cosine) for result in results if result.cosine is not None]
        _draw_line(axes, points, _label(model, results), number)
    axes.set(ylabel=f"cosine similarity to {', '.join(references) or 'the reference'}")
    _format_length_axis(axes, report, report.similarity)
    legend_outside(figure, axes)
    return figure


def save_evaluation_figures(report: EvaluationReport, directory: str | Path) -> list[Path]:
    """Write a PNG file per metric in the report and return the paths."""
    figures = {}
    if report.perplexity:
        figures = {"length_curve": length_curve_figure(report), "positions": position_figure(report)}
    if report.passkey:
        figures["passkey"] = passkey_figure(report)
        figures["passkey_preference"] = passkey_figure(report, "preference")
    if report.order:
        figures["order"] = order_figure(report)
    if report.similarity:
        figures["similarity"] = similarity_figure(report)
    create_figure_directory(Path(directory))
    return [save_figure(figure, Path(directory) / f"{name}.png", dpi=150) for name, figure in figures.items()]


def _line_axes(report: EvaluationReport) -> tuple[Figure, Axes]:
    """Axes high enough for a legend with all models."""
    figure, (axes,) = subplots(1, 1, 6.4, max(3.8, 2 + 0.22 * len(report.models)))
    return figure, axes


def _draw_line(axes: Axes, points: Sequence[tuple[float, Estimate]], label: str, number: int) -> None:
    values = [estimate.value for _, estimate in points]
    marker = MARKERS[number % len(MARKERS)]
    axes.plot([x for x, _ in points], values, label=label, marker=marker, markersize=5, **line_style(number))
    bounds = [(x, *estimate.confidence_interval) for x, estimate in points if estimate.confidence_interval]
    lows, highs = [low for _, low, _ in bounds], [high for _, _, high in bounds]
    axes.fill_between([x for x, _, _ in bounds], lows, highs, color=color(number), alpha=0.2, linewidth=0)


def _label(model: str, results: Sequence[Result]) -> str:
    limits = [result.stopped.max_length for result in results if result.stopped and result.stopped.max_length]
    return f"{model}\n(stops at {min(limits):,})" if limits else model


def _format_log_axis(axes: Axes) -> None:
    """Write 200 instead of 2 x 10^2, and label values between powers of ten where there is room."""
    from matplotlib.ticker import LogFormatter

    for set_formatter in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
        set_formatter(LogFormatter(minor_thresholds=(1.5, 0.6)))


def _format_length_axis(axes: Axes, report: EvaluationReport, results: Sequence[Result]) -> None:
    lengths = sorted({result.length for result in results})
    axes.set(xscale="log", xlabel="window length (tokens)")
    axes.set_xticks(lengths, [f"{length:,}" for length in lengths])
    axes.xaxis.minorticks_off()
    _mark_trained_length(axes, report)


def _mark_trained_length(axes: Axes, report: EvaluationReport) -> None:
    if report.trained_length is None:
        return
    axes.axvline(report.trained_length, color="0.4", linestyle=":", linewidth=1)
    axes.annotate(
        "trained length", (report.trained_length, 0), xycoords=("data", "axes fraction"), fontsize=8, color="0.4",
        xytext=(3, 4), textcoords="offset points", rotation=90,
    )  # fmt: skip
