"""Figures of words and positions together: what probes read, how subspaces lie, and clouds around words."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .style import COLORS, MARKERS, color, legend_below, line_style, subplots

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from ..analysis import Clouds, Separation

BAR = 0.38


def separation(*data: Separation) -> Figure:
    """What linear probes read off each mix; how many directions are filled; angles between words and positions."""
    if not data:
        raise ValueError("name at least one separation to draw")
    figure, (read, filled, angled) = subplots(1, 3, 12.5, 4.2 + 0.17 * len(data))
    places = list(range(len(data)))
    names = [f"{found.name}\n{found.mix}\n{found.width} wide" for found in data]
    for side, (what, label) in enumerate((("position", "position, of unseen words"), ("token", "word, elsewhere"))):
        probes = [getattr(found, what) for found in data]
        shifted = [place + (side - 0.5) * BAR for place in places]
        read.bar(shifted, [probe.accuracy for probe in probes], BAR, label=label, color=color(side))
        read.scatter(
            shifted,
            [probe.chance for probe in probes],
            marker="_",
            s=120,
            color="#000000",
            label="chance" if side else None,
        )
    read.set(title="Read right by a linear probe", ylabel="share of vectors", ylim=(0, 1.05))
    for number, (what, label) in enumerate((("word", "words"), ("position", "positions"), ("mixed", "both"))):
        heights = [getattr(found, f"{what}_dimension") for found in data]
        filled.bar([place + (number - 1) * 0.26 for place in places], heights, 0.26, label=label, color=COLORS[number])
    filled.set(title="Directions that are filled", ylabel="effective dimension")
    for axes in (read, filled):
        axes.set_xticks(places, names, fontsize=8)
        legend_below(axes, 3)
    for number, found in enumerate(data):
        look = line_style(number)
        steps = [(step + 0.5) / len(found.angles) for step in range(len(found.angles))]
        angled.plot(
            steps, found.angles.tolist(), label=f"{found.name}, {found.mix}, {found.width} wide", linewidth=1.6, **look
        )
        angled.plot(steps, found.random_angles.tolist(), color=look["color"], linewidth=0.8, linestyle=":")
    angled.set(
        title="Angles between words and positions\n(thin, dotted: unrelated subspaces)",
        xlabel="principal angles, smallest first (share)",
        ylabel="degrees",
        xlim=(0, 1),
        ylim=(0, 92),
    )
    legend_below(angled)
    return figure


def clouds(data: Clouds, words: int = len(COLORS) - 1) -> Figure:
    """The first words at all positions, in the plane where all differ most; and spread against distance of all."""
    if words < 1:
        raise ValueError(f"at least one word must be shown, got {words}")
    figure, (plane, apart) = subplots(1, 2, 10.5, 4.0)
    for number, points in enumerate(data.plane[:words]):
        marker, label = MARKERS[number % len(MARKERS)], data.labels[number]
        across, up = points[:, 0].tolist(), points[:, 1].tolist()
        plane.scatter(across, up, s=9, marker=marker, color=color(number), label=label, alpha=0.7)
    plane.set(title=f"{data.name}: words at all positions\n({data.shown:.0%} of the variance)", xticks=[], yticks=[])
    plane.legend(fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5), frameon=False, markerscale=1.6)
    farthest = 1.1 * max(data.within.max().item(), data.nearest.max().item())
    apart.plot([0, farthest], [0, farthest], color="0.6", linewidth=0.8)  # as far as the neighbour
    apart.scatter(data.nearest.tolist(), data.within.tolist(), s=9, color=color(0))
    apart.set(
        title=f"{data.own:.0%} are nearest to their own word\n(below the line: clouds apart)",
        xlabel="from a word to the nearest other",
        ylabel="spread within a word",
        xlim=(0, farthest),
        ylim=(0, farthest),
    )
    return figure
