"""Figures of rotary encodings."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..errors import PosEncError
from .style import check_not_empty, draw_diverging, draw_heads, line_style, spread_ticks, subplots

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from ..analysis import RotaryDecay, RotaryFrequencies


def rotary_decay(*results: RotaryDecay) -> Figure:
    """Draw similarity by distance, one line per rotation; for the first one also by pair of features."""
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
