"""The figures of the report as inline SVG, so that the page loads nothing and scales to any screen."""

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

from .finetune import CurvePoint

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WIDTH, HEIGHT = 5.0, 3.6
"""Inches: small enough for labels to stay readable on a phone."""
TICKS = (3, 4, 5, 6, 8, 10, 15, 20, 30, 50, 100, 200, 500)


def perplexity_by_length(evaluation: EvaluationReport) -> str:
    return _svg(length_curve_figure(evaluation), "perplexity by window length, one line per model")


def perplexity_by_position(evaluation: EvaluationReport) -> str:
    return _svg(position_figure(evaluation), "perplexity by position in the longest window, one line per model")


def validation_curves(curves: dict[str, list[CurvePoint]], stock_perplexity: float, long_rows_from: int) -> str:
    """Validation perplexity by tokens of fine-tuning, from right after the swap."""
    figure, (axes,) = subplots(1, 1, WIDTH, HEIGHT)
    for index, (scheme, points) in enumerate(curves.items(), start=1):
        tokens, values = [point.tokens / 1000 for point in points], [point.perplexity for point in points]
        axes.plot(tokens, values, label=scheme, color=COLORS[index], marker=MARKERS[index], markersize=5)
    axes.axhline(stock_perplexity, color=COLORS[0], linestyle="--", linewidth=1.2, label="stock model")
    axes.axvline(long_rows_from / 1000, color="grey", linestyle=":", linewidth=1, label="longer rows from here")
    axes.set(yscale="log", xlabel="thousand tokens of fine-tuning", ylabel="perplexity")
    lowest, highest = axes.get_ylim()
    ticks = [tick for tick in TICKS if lowest <= tick <= highest]
    axes.set_yticks(ticks, [str(tick) for tick in ticks])
    axes.minorticks_off()
    axes.legend()
    return _svg(figure, "validation perplexity during fine-tuning, one line per scheme")


def position_table(table: PositionEmbeddings) -> str:
    figure = plots.position_embeddings(table)
    figure.axes[0].set_title("")
    return _svg(figure, "heat map of the learned position table: positions by features")


def attention_by_distance(models: Sequence[AttentionByDistance]) -> str:
    """A heat map per model with a row per head, on a common scale."""
    figure, panels = subplots(2, 2, WIDTH, 4.6)
    highest = max(attention.binned()[1].max().item() for attention in models)
    image = None
    for index, (axes, attention) in enumerate(zip(panels, models, strict=True)):
        bins, weights = attention.binned()
        layers, heads = weights.shape[:2]
        rows = weights.flatten(0, 1).numpy()
        image = axes.imshow(rows, cmap=SEQUENTIAL_CMAP, vmin=0, vmax=highest, aspect="auto", interpolation="nearest")
        axes.set_title(attention.name, fontsize=10)
        for layer in range(1, layers):
            axes.axhline(layer * heads - 0.5, color="white", linewidth=0.8)
        centers = [layer * heads + (heads - 1) / 2 for layer in range(layers)]
        axes.set_yticks(centers, [str(layer + 1) for layer in range(layers)] if index % 2 == 0 else [])
        axes.set_xticks(range(len(bins)), bins if index > 1 else [], rotation=60, fontsize=8)
    figure.supxlabel("distance in bytes", fontsize=10)
    figure.supylabel("layer, one row per head", fontsize=10)
    if image is not None:
        figure.colorbar(image, ax=panels, label="attention weight")
    return _svg(figure, "heat maps of attention by distance, one per model")


def _svg(figure: Figure, description: str) -> str:
    """SVG without a fixed size, and with ids that no other figure of the page uses."""
    if figure.get_figheight() < HEIGHT + 0.5:
        figure.set_size_inches(WIDTH, HEIGHT)
    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": description}):
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'<g id="[^"]*"', "<g", svg)
    svg = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", svg, count=1)
    return svg.replace("<svg", f'<svg role="img" aria-label="{description}"', 1)
