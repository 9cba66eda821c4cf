"""The figures of the page, as SVG that stands in the page itself: nothing is fetched, and all of it scales."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

import matplotlib

from hf_posenc import plots
from hf_posenc.analysis import AttentionByDistance, PositionEmbeddings
from hf_posenc.evaluation import EvaluationReport
from hf_posenc.plots.evaluation import length_curve_figure, position_figure
from hf_posenc.plots.style import COLORS, MARKERS, SEQUENTIAL_CMAP, subplots

from .recovery import Look

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WIDTH, HEIGHT = 5.0, 3.6
"""Inches: so small that letters can still be read where a telephone shrinks it."""


def lengths(evaluation: EvaluationReport) -> str:
    return _svg(length_curve_figure(evaluation), "perplexity by the length of the window, a line for each model")


def places(evaluation: EvaluationReport) -> str:
    return _svg(position_figure(evaluation), "perplexity by the place in the longest window, a line for each model")


def recoveries(curves: dict[str, list[Look]], original: float, longer_from: int) -> str:
    """From the moment of the change: every model by the tokens that it has seen since."""
    figure, (axes,) = subplots(1, 1, WIDTH, HEIGHT)
    for number, (scheme, looks) in enumerate(curves.items(), start=1):
        seen, found = [look.tokens / 1000 for look in looks], [look.perplexity for look in looks]
        axes.plot(seen, found, label=scheme, color=COLORS[number], marker=MARKERS[number], markersize=5)
    axes.axhline(original, color=COLORS[0], linestyle="--", linewidth=1.2, label="the stock model")
    axes.axvline(longer_from / 1000, color="grey", linestyle=":", linewidth=1, label="from here on longer rows")
    axes.set(yscale="log", xlabel="thousand tokens since the change", ylabel="perplexity")
    ticks = [tick for tick in (3, 4, 5, 6, 8, 10, 15, 20, 30, 50, 100, 200, 500) if _between(tick, axes.get_ylim())]
    axes.set_yticks(ticks, [str(tick) for tick in ticks])
    axes.minorticks_off()
    axes.legend()
    return _svg(figure, "perplexity while each model recovers, by tokens seen")


def _between(value: float, ends: tuple[float, float]) -> bool:
    return ends[0] <= value <= ends[1]


def table(encoding: PositionEmbeddings) -> str:
    figure = plots.position_embeddings(encoding)
    figure.axes[0].set_title("")
    return _svg(figure, "heat map of the learned table: positions downwards, features across")


def attention(found: Sequence[AttentionByDistance]) -> str:
    """A heat map for each model, a row for each head, on one scale."""
    figure, drawn = subplots(2, 2, WIDTH, 4.6)
    highest = max(one.binned()[1].max().item() for one in found)
    image = None
    for number, (axes, one) in enumerate(zip(drawn, found, strict=True)):
        names, shares = one.binned()
        layers, heads = shares.shape[:2]
        rows = shares.flatten(0, 1).numpy()
        image = axes.imshow(rows, cmap=SEQUENTIAL_CMAP, vmin=0, vmax=highest, aspect="auto", interpolation="nearest")
        axes.set_title(one.name, fontsize=10)
        for layer in range(1, layers):
            axes.axhline(layer * heads - 0.5, color="white", linewidth=0.8)
        middles = [layer * heads + (heads - 1) / 2 for layer in range(layers)]
        axes.set_yticks(middles, [str(layer + 1) for layer in range(layers)] if number % 2 == 0 else [])
        axes.set_xticks(range(len(names)), names if number > 1 else [], rotation=60, fontsize=8)
    figure.supxlabel("distance in bytes", fontsize=10)
    figure.supylabel("layer, a row for each head", fontsize=10)
    if image is not None:
        figure.colorbar(image, ax=drawn, label="share of attention")
    return _svg(figure, "heat maps of attention by distance, one for each model")


def _svg(figure: Figure, described: str) -> str:
    """Without a size of its own, and with names that no other figure of the page has."""
    if figure.get_figheight() < HEIGHT + 0.5:
        figure.set_size_inches(WIDTH, HEIGHT)
    kept = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": described}):
        figure.savefig(kept, format="svg", metadata={"Date": None})
    drawing = kept.getvalue()
    drawing = drawing[drawing.index("<svg") :]
    drawing = re.sub(r"<metadata>.*?</metadata>", "", drawing, flags=re.DOTALL)
    drawing = re.sub(r'<g id="[^"]*"', "<g", drawing)
    drawing = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", drawing, count=1)
    drawing = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", drawing, count=1)
    return drawing.replace("<svg", f'<svg role="img" aria-label="{described}"', 1)
