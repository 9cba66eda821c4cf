"""Figures of attention: what depends on the distance from query to key, and rotary encodings."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..errors import PosEncError
from .style import (
    INDEX_CMAP,
    check_not_empty,
    draw_diverging,
    draw_heads,
    draw_heatmap,
    legend_outside,
    line_style,
    spread_ticks,
    subplots,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from ..analysis import AttentionByDistance, BiasByDistance, RelativeBuckets, RotaryDecay, RotaryFrequencies


def attention_by_distance(before: AttentionByDistance, after: AttentionByDistance | None = None) -> Figure:
    """Draw the share of attention by distance, one row per head.

    Args:
        before: The model to draw.
        after: A second model, drawn next to the first with the change from one to the other.

    Returns:
        A matplotlib figure.

    Raises:
        PosEncError: If the models have different numbers of layers or heads, or were measured at different lengths.
    """
    results = [before] if after is None else [before, after]
    bins, shares = zip(*(result.binned() for result in results), strict=True)
    if len({share.shape[:2] for share in shares}) > 1:
        raise PosEncError("the two models must have the same number of layers and heads")
    if bins[0] != bins[-1]:
        raise PosEncError("the two models must be measured on rows of the same length")
    figure, panels = draw_heads([result.name for result in results], shares, "share of attention")
    for axes in panels:
        axes.set_xticks(range(len(bins[0])), bins[0], rotation=45)
        axes.set_xlabel("distance")
    return figure


def bias_by_distance(bias: BiasByDistance) -> Figure:
    """Draw the bias on the attention scores by distance, one line per head.

    Args:
        bias: The result of `analysis.bias_by_distance`.

    Returns:
        The figure; see `save_figure`.
    """
    columns = -(-len(bias.values) // 16)
    figure, (axes,) = subplots(1, 1, 7.0 + columns, 3.8)
    for head, values in enumerate(bias.values.tolist()):
        axes.plot(bias.distances.tolist(), values, label=f"head {head}", linewidth=1.3, **line_style(head))
    axes.axhline(0, color="0.6", linewidth=0.8)
    origin = "" if bias.query is None else f" from position {bias.query}"
    axes.set(title=f"{bias.name}: bias by distance{origin}", xlabel="distance (key - query)", ylabel="bias")
    legend_outside(figure, axes, columns)
    return figure


def relative_buckets(*results: RelativeBuckets) -> Figure:
    """Draw the table row that each pair of query and key reads, one heat map per scheme.

    Args:
        *results: Results of `analysis.relative_buckets`.

    Returns:
        The figure; see `save_figure`.
    """
    check_not_empty(results)
    figure, panels = subplots(1, len(results), 4.2 * len(results), 3.6)
    for axes, buckets in zip(panels, results, strict=True):
        draw_heatmap(axes, buckets.index.numpy(), "row", cmap=INDEX_CMAP)
        axes.set(title=f"{buckets.name}: {buckets.num_used} rows", xlabel="key", ylabel="query")
    return figure


def rotary_decay(*results: RotaryDecay) -> Figure:
    """Draw similarity by distance, one line per rotation; for the first one also by pair of features.

    Args:
        *results: Results of `analysis.rotary_decay`.

    Returns:
        The figure; see `save_figure`.
    """
    check_not_empty(results)
    figure, (total, by_pair) = subplots(1, 2, 10.0, 3.8)
    for number, decay in enumerate(results):
        total.plot(decay.similarity.numpy(), label=decay.name, linewidth=1.1, **line_style(number))
    total.axhline(0, color="0.6", linewidth=0.8)
    total.set(title="Decay of similarity", xlabel="distance", ylabel="similarity of equal vectors")
    total.legend(fontsize=8)
    first = results[0]
    draw_diverging(by_pair, first.similarity_by_pair.numpy(), "similarity")
    by_pair.set(title=f"{first.name}: by pair of features", xlabel="distance", ylabel="wavelength (positions)")
    ticks = spread_ticks(len(first.wavelengths), 6)
    by_pair.set_yticks(ticks, [f"{first.wavelengths[pair]:,.0f}" for pair in ticks])
    return figure


def rotary_frequencies(before: RotaryFrequencies, after: RotaryFrequencies | None = None) -> Figure:
    """Draw the contribution of each frequency to the attention scores, one row per head.

    Args:
        before: The model to draw.
        after: A second model, drawn next to the first with the change from one to the other, pair by pair.

    Returns:
        A matplotlib figure.

    Raises:
        PosEncError: If the models rotate different numbers of pairs, layers or heads.
    """
    results = [before] if after is None else [before, after]
    shares = [result.share for result in results]
    if shares[0].shape != shares[-1].shape:
        raise PosEncError("the two models must rotate the same number of pairs, layers and heads")
    figure, panels = draw_heads([result.name for result in results], shares, "contribution", before.layers)
    ticks = spread_ticks(shares[0].shape[-1], 8)
    for axes, result in zip(panels, results, strict=False):
        axes.set_xticks(ticks, [f"{result.wavelengths[pair]:,.0f}" for pair in ticks], rotation=45)
        axes.set_xlabel("wavelength (positions)")
    for axes in panels[len(results) :]:  # wavelengths may differ between the two
        axes.set_xticks(ticks)
        axes.set_xlabel("pair of features, highest frequency first")
    return figure
