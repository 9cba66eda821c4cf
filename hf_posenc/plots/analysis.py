"""Figures of what `hf_posenc.analysis` measures, named like the analyses. Each returns a matplotlib figure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..errors import PosEncError
from . import style

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from .. import analysis

MAX_RELATIVE_RANGE = 2.0
"""Upper end of the axis of feature ranges: learned tables have a few extreme features."""


def position_embeddings(*results: analysis.PositionEmbeddings) -> Figure:
    """Draw position embeddings as heat maps of positions by features, side by side.

    Args:
        *results: Results of `analysis.position_embeddings`.

    Returns:
        The figure; see `save_figure`.
    """
    style.check_not_empty(results)
    figure, panels = style.panel_grid(len(results), 3.6 if len(results) == 1 else 3.0)
    for axes, embeddings in zip(panels, results, strict=True):
        style.draw_diverging(axes, embeddings.table.numpy(), "value")
        axes.set(title=f"{embeddings.name}: position embeddings", xlabel="feature", ylabel="position")
    return figure


def feature_ranges(*results: analysis.PositionEmbeddings) -> Figure:
    """Draw the range of each feature of position embeddings over positions, one dot per feature.

    Args:
        *results: Embeddings to compare. Ranges are relative to `reference_range`, features to the width.

    Returns:
        The figure; see `save_figure`.
    """
    style.check_not_empty(results)
    figure, (axes,) = style.subplots(1, 1, 7.0, 3.4 + 0.18 * len(results))
    highest = 0.0
    for number, embeddings in enumerate(results):
        features = embeddings.table.shape[1]
        relative = embeddings.ranges / (embeddings.reference_range or 1.0)
        outliers = int((relative > MAX_RELATIVE_RANGE).sum())
        label = f"{embeddings.name}: {int(embeddings.static.sum())} of {features} static"
        label += f", {outliers} above {MAX_RELATIVE_RANGE:g}" if outliers else ""
        x = [(feature + 0.5) / features for feature in range(features)]
        axes.plot(x, relative.numpy(), style.marker(number), color=style.color(number), markersize=2.5, label=label)
        highest = max(highest, relative.max().item())
    axes.axhline(0.05, color="0.3", linewidth=0.9, linestyle=":", label="static below this line")
    axes.axvline(0.5, color="0.6", linewidth=0.8)
    axes.set(
        title=f"Range of each feature over {len(results[0].table)} positions",
        xlabel="feature / width",
        ylabel="range (1 = 90th percentile)",
        xlim=(0, 1),
        ylim=(0, 1.05 * min(MAX_RELATIVE_RANGE, highest or 1.0)),
    )
    style.legend_below(axes)
    return figure


def token_clusters(clusters: analysis.TokenClusters) -> Figure:
    """Draw tokens at all positions in their principal plane, and spread against distance to the nearest token.

    Args:
        clusters: The result of `analysis.token_clusters`. The plane shows the first tokens only.

    Returns:
        The figure; see `save_figure`.
    """
    figure, (plane, spread) = style.panel_grid(2, 3.8, columns=1)
    for number, points in enumerate(clusters.projection[: len(style.COLORS) - 1]):
        x, y = points.T.tolist()
        marker, color, label = style.marker(number), style.color(number), clusters.labels[number]
        plane.scatter(x, y, s=9, marker=marker, color=color, label=label, alpha=0.7)
    explained = f"{clusters.explained_variance:.0%} of the variance"
    plane.set(title=f"{clusters.name}: tokens at all positions\n(PCA, {explained})", xticks=[], yticks=[])
    plane.legend(fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5), frameon=False, markerscale=1.6)
    limit = 1.1 * max(clusters.spread.max().item(), clusters.nearest_distance.max().item())
    spread.plot([0, limit], [0, limit], color="0.6", linewidth=0.8)
    spread.scatter(clusters.nearest_distance.tolist(), clusters.spread.tolist(), s=9, color=style.color(0))
    spread.set(
        title=f"{clusters.accuracy:.0%} are closest to their own token\n(below the line: separate clusters)",
        xlabel="distance to the nearest other token",
        ylabel="spread within a token",
        xlim=(0, limit),
        ylim=(0, limit),
    )
    return figure


def separability(*results: analysis.Separability) -> Figure:
    """Draw probe accuracies, effective dimensions, and principal angles between tokens and positions.

    Args:
        *results: Results of `analysis.separability`.

    Returns:
        The figure; see `save_figure`.
    """
    style.check_not_empty(results)
    figure, (probes, dimensions, angles) = style.panel_grid(3, 3.6 + 0.17 * len(results), columns=1)
    labels = [f"{result.name}\n{result.mix}\nwidth {result.width}" for result in results]
    groups = {
        "position (unseen tokens)": [result.position_probe for result in results],
        "token (unseen positions)": [result.token_probe for result in results],
    }
    for number, (label, group) in enumerate(groups.items()):
        x = [index + (number - 0.5) * 0.38 for index in range(len(results))]
        probes.bar(x, [probe.accuracy for probe in group], 0.38, label=label, color=style.color(number))
        chance = "chance" if number else None
        probes.scatter(x, [probe.chance for probe in group], marker="_", s=120, color="#000000", label=chance)
    probes.set(title="Linear probes", ylabel="accuracy", ylim=(0, 1.05))
    for number, kind in enumerate(("token", "position", "mixed")):
        x = [index + (number - 1) * 0.26 for index in range(len(results))]
        heights = [getattr(result, f"{kind}_dimension") for result in results]
        dimensions.bar(x, heights, 0.26, label=kind, color=style.color(number))
    dimensions.set(title="Effective dimension", ylabel="participation ratio")
    for axes in (probes, dimensions):
        axes.set_xticks(range(len(results)), labels, fontsize=8)
        style.legend_below(axes, 3)
    for number, result in enumerate(results):
        x = [(index + 0.5) / len(result.angles) for index in range(len(result.angles))]
        label = f"{result.name}, {result.mix}, width {result.width}"
        angles.plot(x, result.angles.tolist(), label=label, linewidth=1.6, **style.line_style(number))
        angles.plot(x, result.random_angles.tolist(), color=style.color(number), linewidth=0.8, linestyle=":")
    angles.set(
        title="Principal angles of tokens and positions\n(thin dotted lines: random subspaces)",
        xlabel="angles, smallest first (share)",
        ylabel="degrees",
        xlim=(0, 1),
        ylim=(0, 92),
    )
    style.legend_below(angles)
    return figure


def attention_by_distance(*results: analysis.AttentionByDistance) -> Figure:
    """Draw the share of attention by distance, one row per head, models below each other.

    Args:
        *results: Results of `analysis.attention_by_distance`. For two of them, the change from one to the other is
            drawn as well.

    Returns:
        The figure; see `save_figure`.

    Raises:
        PosEncError: If the models have different numbers of layers or heads, or were measured at different lengths.
    """
    style.check_not_empty(results)
    bins, shares = zip(*(result.binned() for result in results), strict=True)
    if len({share.shape[:2] for share in shares}) > 1:
        raise PosEncError("all models must have the same number of layers and heads")
    if any(labels != bins[0] for labels in bins):
        raise PosEncError("all models must be measured on rows of the same length")
    figure, panels = style.draw_heads([result.name for result in results], shares, "share of attention")
    for axes in panels:
        axes.set_xticks(range(len(bins[0])), bins[0], rotation=45)
        axes.set_xlabel("distance")
    return figure


def bias_by_distance(*results: analysis.BiasByDistance) -> Figure:
    """Draw the bias on the attention scores by distance, one line per head, schemes side by side.

    Every panel has its own scale. The legend names the heads of the one with most of them.

    Args:
        *results: Results of `analysis.bias_by_distance`.

    Returns:
        The figure; see `save_figure`.
    """
    style.check_not_empty(results)
    most_heads = max(range(len(results)), key=lambda index: len(results[index].values))
    columns = -(-len(results[most_heads].values) // 16)
    figure, panels = style.panel_grid(len(results), 3.8 if len(results) == 1 else 3.2)
    for axes, bias in zip(panels, results, strict=True):
        for head, values in enumerate(bias.values.tolist()):
            axes.plot(bias.distances.tolist(), values, label=f"head {head}", linewidth=1.3, **style.line_style(head))
        axes.axhline(0, color="0.6", linewidth=0.8)
        origin = "" if bias.query is None else f" from position {bias.query}"
        axes.set(title=f"{bias.name}: bias by distance{origin}", xlabel="distance (key - query)", ylabel="bias")
    style.legend_outside(figure, panels[most_heads], columns)
    return figure


def relative_buckets(*results: analysis.RelativeBuckets) -> Figure:
    """Draw the table row that each pair of query and key reads, one heat map per scheme.

    Args:
        *results: Results of `analysis.relative_buckets`.

    Returns:
        The figure; see `save_figure`.
    """
    style.check_not_empty(results)
    figure, panels = style.panel_grid(len(results), 3.6 if len(results) == 1 else 3.0)
    for axes, buckets in zip(panels, results, strict=True):
        style.draw_heatmap(axes, buckets.index.numpy(), "row", cmap=style.INDEX_CMAP)
        axes.set(title=f"{buckets.name}: {buckets.num_used} rows", xlabel="key", ylabel="query")
    return figure


def rotary_decay(*results: analysis.RotaryDecay) -> Figure:
    """Draw similarity by distance, one line per rotation; for the first one also by pair of features.

    Args:
        *results: Results of `analysis.rotary_decay`.

    Returns:
        The figure; see `save_figure`.
    """
    style.check_not_empty(results)
    figure, (total, by_pair) = style.panel_grid(2, 3.4, columns=1)
    for number, decay in enumerate(results):
        total.plot(decay.similarity.numpy(), label=decay.name, linewidth=1.1, **style.line_style(number))
    total.axhline(0, color="0.6", linewidth=0.8)
    total.set(title="Decay of similarity", xlabel="distance", ylabel="similarity of equal vectors")
    total.legend(fontsize=8)
    first = results[0]
    style.draw_diverging(by_pair, first.similarity_by_pair.numpy(), "similarity")
    by_pair.set(title=f"{first.name}: by pair of features", xlabel="distance", ylabel="wavelength (positions)")
    ticks = style.spread_ticks(len(first.wavelengths), 6)
    by_pair.set_yticks(ticks, [f"{first.wavelengths[pair]:,.0f}" for pair in ticks])
    return figure


def rotary_frequencies(*results: analysis.RotaryFrequencies) -> Figure:
    """Draw the contribution of each frequency to the attention scores, one row per head, models below each other.

    Args:
        *results: Results of `analysis.rotary_frequencies`. For two of them, the change from one to the other is drawn
            as well, pair by pair.

    Returns:
        The figure; see `save_figure`.

    Raises:
        PosEncError: If the models rotate different numbers of pairs, layers or heads.
    """
    style.check_not_empty(results)
    shares = [result.share for result in results]
    if len({share.shape for share in shares}) > 1:
        raise PosEncError("all models must rotate the same number of pairs, layers and heads")
    figure, panels = style.draw_heads([result.name for result in results], shares, "contribution", results[0].layers)
    ticks = style.spread_ticks(shares[0].shape[-1], 8)
    for axes, result in zip(panels, results, strict=False):
        axes.set_xticks(ticks, [f"{result.wavelengths[pair]:,.0f}" for pair in ticks], rotation=45)
        axes.set_xlabel("wavelength (positions)")
    for axes in panels[len(results) :]:  # wavelengths may differ between the two
        axes.set_xticks(ticks)
        axes.set_xlabel("pair of features, highest frequency first")
    return figure
