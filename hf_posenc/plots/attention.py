"""Figures of a model at work: attention by distance, and the use of a rotation's frequencies."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .style import draw_diverging, draw_heatmap, subplots

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from ..analysis import Attended, Frequencies

ROW, LABELLED, LOWEST = 0.09, 24, 3.4
"""Inches for a head; how many rows have a label at most; inches of the lowest figure."""


def attention(before: Attended, after: Attended | None = None) -> Figure:
    """The share of attention by distance, a row for each layer and head; with a second model, it and the difference."""
    if after is not None and before.share.shape[:2] != after.share.shape[:2]:
        raise ValueError("the two models must have the same number of layers and heads")
    shown = [before] if after is None else [before, after]
    layers, heads = before.share.shape[:2]
    count = 1 if after is None else 3
    figure, drawn = subplots(1, count, 4.6 * count, _height(layers * heads))
    highest = max(data.binned()[1].max().item() for data in shown)
    for axes, data in zip(drawn, shown, strict=False):
        names, shares = data.binned()
        draw_heatmap(axes, shares.flatten(0, 1).numpy(), "share of attention", vmax=highest)
        axes.set_title(data.name)
        _label(axes, names, layers, heads)
    if after is not None:
        (names, first), (others, second) = before.binned(), after.binned()
        if names != others:
            raise ValueError("the two models were not measured on rows of the same length")
        draw_diverging(drawn[2], (second - first).flatten(0, 1).numpy(), "change of the share")
        drawn[2].set_title("change")
        _label(drawn[2], names, layers, heads)
    return figure


def frequencies(before: Frequencies, after: Frequencies | None = None) -> Figure:
    """The share of each frequency in the logits, a row for each layer and head, fastest first.

    With a second model, it and the difference, pair by pair: the wavelengths of its pairs may be others.
    """
    if after is not None and before.share.shape != after.share.shape:
        raise ValueError("the two models must turn as many pairs of features, in as many layers and heads")
    shown = [before] if after is None else [before, after]
    layers, heads, count = before.share.shape
    columns = 1 if after is None else 3
    figure, drawn = subplots(1, columns, 4.6 * columns + (1.4 if after is None else 0), _height(layers * heads))
    highest = max(data.share.max().item() for data in shown)
    ticks = sorted({round(step * (count - 1) / 7) for step in range(8)})
    for axes, data in zip(drawn, shown, strict=False):
        draw_heatmap(axes, data.share.flatten(0, 1).numpy(), "use: share of the logits' magnitude", vmax=highest)
        _label(axes, [], layers, heads, data.layers)
        axes.set_xticks(ticks, [f"{data.wavelengths[pair]:,.0f}" for pair in ticks], rotation=45)
        axes.set(title=data.name, xlabel="wavelength (positions)")
    if after is not None:
        draw_diverging(drawn[2], (after.share - before.share).flatten(0, 1).numpy(), "change of the share")
        _label(drawn[2], [], layers, heads, before.layers)
        drawn[2].set_xticks(ticks, [str(pair) for pair in ticks])
        drawn[2].set(title="change", xlabel="pair of features, fastest first")
    return figure


def _height(rows: int) -> float:
    return max(LOWEST, 2.2 + ROW * rows)


def _label(axes: Axes, bins: list[str], layers: int, heads: int, numbers: tuple[int, ...] | None = None) -> None:
    """Rows by layer and head, with a line between layers."""
    for layer in range(1, layers):
        axes.axhline(layer * heads - 0.5, color="0.75", linewidth=0.8)
    every = -(-layers // LABELLED)
    middles = [layer * heads + (heads - 1) / 2 for layer in range(0, layers, every)]
    axes.set_yticks(middles, [f"layer {(numbers or range(layers))[layer]}" for layer in range(0, layers, every)])
    axes.set_ylabel("a row for each head")
    if bins:
        axes.set_xticks(range(len(bins)), bins, rotation=45)
        axes.set_xlabel("distance")
