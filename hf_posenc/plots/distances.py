"""Figures of what depends on distance: rows that are looked up, biases, and the decay of a rotation."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .style import INDEX_CMAP, draw_diverging, draw_heatmap, line_style, subplots

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from ..analysis import Bias, Decay, RelativeRows


def relative(*data: RelativeRows) -> Figure:
    """The row of the table that each pair looks up: a heat map for each scheme, with its clipping or buckets."""
    if not data:
        raise ValueError("name at least one matrix of rows to draw")
    figure, drawn = subplots(1, len(data), 4.2 * len(data), 3.6)
    for axes, rows in zip(drawn, data, strict=True):
        draw_heatmap(axes, rows.index.numpy(), "row", cmap=INDEX_CMAP)
        axes.set(title=f"{rows.name}: {rows.used} rows", xlabel="key", ylabel="query")
    return figure


def bias(data: Bias) -> Figure:
    """The bias by distance: a line for each head."""
    columns = -(-len(data.values) // 16)
    figure, (axes,) = subplots(1, 1, 7.0 + columns, 3.8)
    for head, values in enumerate(data.values.tolist()):
        axes.plot(data.distances.tolist(), values, label=f"head {head}", linewidth=1.3, **line_style(head))
    seen = "" if data.query is None else f", seen from position {data.query}"
    axes.axhline(0, color="0.6", linewidth=0.8)
    axes.set(
        title=f"{data.name}: bias by distance{seen}", xlabel="distance (key - query)", ylabel="added to the logits"
    )
    figure.legend(loc="outside right upper", fontsize=8, ncols=columns)
    return figure


def decay(*data: Decay) -> Figure:
    """The similarity of equal vectors by distance, a line for each rotation; and by pair of features, of the first."""
    if not data:
        raise ValueError("name at least one decay to draw")
    figure, (left, right) = subplots(1, 2, 10.0, 3.8)
    for number, found in enumerate(data):
        left.plot(found.similarity.numpy(), label=found.name, linewidth=1.1, **line_style(number))
    left.axhline(0, color="0.6", linewidth=0.8)
    left.set(title="Similarity after turning", xlabel="distance", ylabel="similarity of equal vectors")
    left.legend(fontsize=8)
    first = data[0]
    draw_diverging(right, first.by_pair.numpy(), "similarity")
    right.set(title=f"{first.name}: pair by pair, fastest first", xlabel="distance", ylabel="wavelength (positions)")
    shown = sorted({round(step * (len(first.wavelengths) - 1) / 5) for step in range(6)})
    right.set_yticks(shown, [f"{first.wavelengths[pair]:,.0f}" for pair in shown])
    return figure
