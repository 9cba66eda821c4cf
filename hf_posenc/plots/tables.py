"""Figures of what belongs to a position: the encoding itself, and how far its features move."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .style import MARKERS, color, draw_diverging, legend_below, subplots

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from ..analysis import Encoding, Movement

HIGHEST = 2.0
"""Where the picture of ranges ends: trained tables have a few features far beyond the rest."""


def encoding(data: Encoding) -> Figure:
    """A heat map of the encoding: positions down, features across."""
    figure, (axes,) = subplots(1, 1, 7.0, 3.6)
    draw_diverging(axes, data.table.numpy(), "value")
    axes.set(title=f"{data.name}: the encoding", xlabel="feature", ylabel="position")
    return figure


def movement(*data: Movement) -> Figure:
    """How far each feature goes between its lowest and highest value: a dot for each feature."""
    if not data:
        raise ValueError("name at least one movement to draw")
    figure, (axes,) = subplots(1, 1, 7.0, 3.4 + 0.18 * len(data))
    for number, moved in enumerate(data):
        colour, size = color(number), len(moved.ranges)
        # Of a wide range, so that encodings of any scale stand side by side; features as a share of the width.
        wide = moved.wide or 1.0
        places = [(feature + 0.5) / size for feature in range(size)]
        label = f"{moved.name}: {int(moved.still.sum())} of {size} hardly move"
        beyond = int((moved.ranges > HIGHEST * wide).sum())
        label += f", {beyond} beyond {HIGHEST:g}" if beyond else ""
        dots: dict[str, Any] = {"marker": MARKERS[number % len(MARKERS)], "markersize": 2.5, "linestyle": "none"}
        axes.plot(places, (moved.ranges / wide).numpy(), color=colour, label=label, **dots)
    axes.axhline(
        max(moved.threshold / (moved.wide or 1.0) for moved in data),
        color="0.3", linewidth=0.9, linestyle=":", label="hardly moves below this",
    )  # fmt: skip
    axes.axvline(0.5, color="0.6", linewidth=0.8)
    axes.set(
        title=f"Range of each feature over {data[0].positions} positions",
        xlabel="feature, as a share of the width",
        ylabel="range (1: of the most mobile tenth)",
        xlim=(0, 1),
        ylim=(0, 1.05 * min(HIGHEST, max(float((moved.ranges / (moved.wide or 1.0)).max()) for moved in data) or 1.0)),
    )
    legend_below(axes)
    return figure
