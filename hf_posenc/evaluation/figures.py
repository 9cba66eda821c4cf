"""Figures of an evaluation: every function takes it and returns a matplotlib figure, in the colours of all others."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..plots.style import (
    MARKERS,
    SEQUENTIAL_CMAP,
    create_figure_directory,
    legend_outside,
    line_style,
    save_figure,
    subplots,
)
from .estimates import Estimate
from .results import OrderResult, Result

if TYPE_CHECKING:
    from .report import Evaluation

SHORTEST_HEIGHT, LINE_HEIGHT = 3.8, 0.22
"""Inches: of a figure with lines, and of each name in its legend."""


def _look(number: int) -> dict[str, Any]:
    return {**line_style(number), "marker": MARKERS[number % len(MARKERS)], "markersize": 5}


def _lines(evaluation: Evaluation) -> tuple[Any, Any]:
    names = LINE_HEIGHT * len(evaluation.models)
    figure, (axes,) = subplots(1, 1, 6.4, max(SHORTEST_HEIGHT, 2 + names))
    return figure, axes


def _line(axes: Any, places: Sequence[float], estimates: Sequence[Estimate], name: str, number: int) -> None:
    look = _look(number)
    axes.plot(places, [one.value for one in estimates], label=name, **look)
    known = [(place, one) for place, one in zip(places, estimates, strict=True) if one.low is not None]
    if known:
        lows, highs = [one.low for _, one in known], [one.high for _, one in known]
        axes.fill_between([place for place, _ in known], lows, highs, color=look["color"], alpha=0.2, linewidth=0)


def _plain_numbers(axes: Any) -> None:
    """200, not 2 x 10^2, and between powers of ten too where there is room."""
    from matplotlib.ticker import LogFormatter

    for which in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
        which(LogFormatter(minor_thresholds=(1.5, 0.6)))


def _trained(axes: Any, evaluation: Evaluation) -> None:
    """A line at the trained length, with its name."""
    if evaluation.trained_length is None:
        return
    axes.axvline(evaluation.trained_length, color="0.4", linestyle=":", linewidth=1)
    axes.annotate(
        "trained length", (evaluation.trained_length, 0), xycoords=("data", "axes fraction"), fontsize=8, color="0.4",
        xytext=(3, 4), textcoords="offset points", rotation=90,
    )  # fmt: skip


def _by_length(axes: Any, evaluation: Evaluation, results: Sequence[Result]) -> None:
    lengths = sorted({one.length for one in results})
    axes.set(xscale="log", xlabel="length of the window (tokens)")
    axes.set_xticks(lengths, [f"{length:,}" for length in lengths])
    axes.xaxis.minorticks_off()
    _trained(axes, evaluation)


def _told_end(name: str, results: Sequence[Any]) -> str:
    """A model's name, with where it ends."""
    ends = {one.stop.reaches for one in results if one.stop and one.stop.reaches is not None}
    return f"{name}\n(ends at {min(ends):,})" if ends else name


def length_curve_figure(evaluation: Evaluation) -> Any:
    """Perplexity by length, with intervals. A line that ends has a cross, and the name says where its model does."""
    figure, axes = _lines(evaluation)
    for number, model in enumerate(evaluation.models):
        results = [one for one in evaluation.perplexity if one.model == model]
        found = [(one.length, one.perplexity) for one in results if one.perplexity is not None]
        name = _told_end(model, results)
        _line(axes, [length for length, _ in found], [value for _, value in found], name, number)
        if found and any(one.stop for one in results):
            look = {**_look(number), "marker": "x", "markersize": 12, "markeredgewidth": 2.5}
            axes.plot([found[-1][0]], [found[-1][1].value], **look)
    axes.set(yscale="log", ylabel="perplexity")
    _by_length(axes, evaluation, evaluation.perplexity)
    _plain_numbers(axes)
    legend_outside(figure, axes)
    return figure


def position_figure(evaluation: Evaluation, length: int | None = None) -> Any:
    """Perplexity by the place inside of the window, at one length: else the greatest that any model reaches."""
    reached = [one.length for one in evaluation.perplexity if one.positions]
    if length is None and reached:
        length = max(reached)
    figure, axes = _lines(evaluation)
    for number, model in enumerate(evaluation.models):
        for one in evaluation.perplexity:
            if one.model == model and one.length == length and one.positions:
                middles = [(place.start + place.end) / 2 for place in one.positions]
                _line(axes, middles, [place.perplexity for place in one.positions], model, number)
    axes.set(yscale="log", xlabel=f"place in a window of {length or 0:,} tokens", ylabel="perplexity")
    if length is not None and length > (evaluation.trained_length or length):
        _trained(axes, evaluation)
    _plain_numbers(axes)
    legend_outside(figure, axes)
    return figure


def passkey_figure(evaluation: Evaluation, value: str = "accuracy") -> Any:
    """A heat map for each model: length across, depth downwards, the share of keys found (or `preference`)."""
    if value not in ("accuracy", "preference"):
        raise ValueError(f"a heat map shows accuracy or preference, not {value!r}")
    figure, drawn = subplots(1, len(evaluation.models), 1.2 + 3.0 * len(evaluation.models), 3.6)
    lengths = sorted({one.length for one in evaluation.passkey})
    depths = sorted({cell.depth for one in evaluation.passkey for cell in one.depths})
    image = None
    for axes, model in zip(drawn, evaluation.models, strict=True):
        heat = [[float("nan")] * len(lengths) for _ in depths]
        for one in (found for found in evaluation.passkey if found.model == model):
            for cell in one.depths:
                heat[depths.index(cell.depth)][lengths.index(one.length)] = getattr(cell, value).value
            if one.stop:
                told = "not measured" if one.stop.reaches is None else f"ends at {one.stop.reaches:,}"
                middle = (len(depths) - 1) / 2
                axes.text(lengths.index(one.length), middle, told, ha="center", va="center", rotation=90, fontsize=8)
        if depths:
            image = axes.imshow(heat, vmin=0, vmax=1, cmap=SEQUENTIAL_CMAP, aspect="auto")
        axes.set(title=model, xlabel="length (tokens)", ylabel="depth of the key")
        axes.set_xticks(range(len(lengths)), [f"{length:,}" for length in lengths], rotation=45)
        axes.set_yticks(range(len(depths)), [f"{depth:.0%}" for depth in depths])
    if image is not None:
        label = "keys found" if value == "accuracy" else "key preferred to another\n(half is chance)"
        figure.colorbar(image, ax=drawn, label=label)
    return figure


def order_figure(evaluation: Evaluation) -> Any:
    """Nats that shuffling costs, by the size of the blocks, at the greatest length of each model."""
    figure, axes = _lines(evaluation)
    blocks: list[int | None] = []
    for number, model in enumerate(evaluation.models):
        results: list[OrderResult] = [one for one in evaluation.order if one.model == model and one.shuffles]
        if results:
            last = max(results, key=lambda one: one.length)
            blocks = [cell.block for cell in last.shuffles]
            places = [float(place) for place in range(len(blocks))]
            _line(axes, places, [cell.increase for cell in last.shuffles], f"{model}\n{last.length:,} tokens", number)
    axes.axhline(0, color="0.6", linewidth=0.8)
    axes.set_xticks(range(len(blocks)), ["all" if block is None else str(block) for block in blocks])
    axes.set(xlabel="tokens shuffled among each other", ylabel="loss by shuffling (nats a token)")
    legend_outside(figure, axes)
    return figure


def similarity_figure(evaluation: Evaluation) -> Any:
    """The cosine of each model's embeddings with the original's, by length, with intervals."""
    figure, axes = _lines(evaluation)
    originals = sorted({one.original for one in evaluation.similarity if one.original})
    for number, model in enumerate(evaluation.models):
        results = [one for one in evaluation.similarity if one.model == model]
        found = [(one.length, one.cosine) for one in results if one.cosine is not None]
        _line(axes, [length for length, _ in found], [value for _, value in found], _told_end(model, results), number)
    axes.set(ylabel=f"cosine with {', '.join(originals) or 'the original'}")
    _by_length(axes, evaluation, evaluation.similarity)
    legend_outside(figure, axes)
    return figure


def write_figures(evaluation: Evaluation, directory: str | Path) -> list[Path]:
    """A PNG for each measure that there is."""
    found = {}
    if evaluation.perplexity:
        found = {"length_curve": length_curve_figure(evaluation), "positions": position_figure(evaluation)}
    if evaluation.passkey:
        found["passkey"] = passkey_figure(evaluation)
        found["passkey_preference"] = passkey_figure(evaluation, "preference")
    if evaluation.order:
        found["order"] = order_figure(evaluation)
    if evaluation.similarity:
        found["similarity"] = similarity_figure(evaluation)
    create_figure_directory(Path(directory))
    return [save_figure(figure, Path(directory) / f"{name}.png", dpi=150) for name, figure in found.items()]
