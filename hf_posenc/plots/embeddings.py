"""Figures of position embeddings and of how they mix with token embeddings."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..errors import PosEncError
from .style import COLORS, MARKERS, check_not_empty, color, draw_diverging, legend_below, line_style, subplots

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from ..analysis import PositionEmbeddings, Separability, TokenClusters

MAX_RELATIVE_RANGE = 2.0
"""Upper end of the axis of feature ranges: learned tables have a few extreme features."""


def position_embeddings(embeddings: PositionEmbeddings) -> Figure:
    """Draw position embeddings as a heat map of positions by features.

    Args:
        embeddings: The result of `analysis.position_embeddings`.

    Returns:
        The figure; see `save_figure`.
    """
    figure, (axes,) = subplots(1, 1, 7.0, 3.6)
    draw_diverging(axes, embeddings.table.numpy(), "value")
    axes.set(title=f"{embeddings.name}: position embeddings", xlabel="feature", ylabel="position")
    return figure


def feature_ranges(*results: PositionEmbeddings) -> Figure:
    """Draw the range of each feature of position embeddings over positions, one dot per feature.

    Args:
        *results: Embeddings to compare. Ranges are relative to `reference_range`, features to the width.

    Returns:
        A matplotlib figure.
    """
    check_not_empty(results)
    figure, (axes,) = subplots(1, 1, 7.0, 3.4 + 0.18 * len(results))
    highest = 0.0
    for number, embeddings in enumerate(results):
        features = embeddings.table.shape[1]
        relative = embeddings.ranges / (embeddings.reference_range or 1.0)
        outliers = int((relative > MAX_RELATIVE_RANGE).sum())
        label = f"{embeddings.name}: {int(embeddings.static.sum())} of {features} static"
        label += f", {outliers} above {MAX_RELATIVE_RANGE:g}" if outliers else ""
        x = [(feature + 0.5) / features for feature in range(features)]
        axes.plot(x, relative.numpy(), MARKERS[number % len(MARKERS)], color=color(number), markersize=2.5, label=label)
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
    legend_below(axes)
    return figure


def token_clusters(clusters: TokenClusters, num_tokens: int = len(COLORS) - 1) -> Figure:
    """Draw tokens at all positions in their principal plane, and spread against distance to the nearest token.

    Args:
        clusters: The clusters to draw.
        num_tokens: How many tokens to show in the plane.

    Returns:
        A matplotlib figure.
    """
    if num_tokens < 1:
        raise PosEncError(f"num_tokens must be at least 1, got {num_tokens}")
    figure, (plane, spread) = subplots(1, 2, 10.5, 4.0)
    for number, points in enumerate(clusters.projection[:num_tokens]):
        marker, label = MARKERS[number % len(MARKERS)], clusters.labels[number]
        x, y = points.T.tolist()
        plane.scatter(x, y, s=9, marker=marker, color=color(number), label=label, alpha=0.7)
    explained = f"{clusters.explained_variance:.0%} of the variance"
    plane.set(title=f"{clusters.name}: tokens at all positions\n(PCA, {explained})", xticks=[], yticks=[])
    plane.legend(fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5), frameon=False, markerscale=1.6)
    limit = 1.1 * max(clusters.spread.max().item(), clusters.nearest_distance.max().item())
    spread.plot([0, limit], [0, limit], color="0.6", linewidth=0.8)
    spread.scatter(clusters.nearest_distance.tolist(), clusters.spread.tolist(), s=9, color=color(0))
    spread.set(
        title=f"{clusters.accuracy:.0%} are closest to their own token\n(below the line: separate clusters)",
        xlabel="distance to the nearest other token",
        ylabel="spread within a token",
        xlim=(0, limit),
        ylim=(0, limit),
    )
    return figure


def separability(*results: Separability) -> Figure:
    """Draw probe accuracies, effective dimensions, and principal angles between tokens and positions.

    Args:
        *results: Results of `analysis.separability`.

    Returns:
        The figure; see `save_figure`.
    """
    check_not_empty(results)
    figure, (probes, dimensions, angles) = subplots(1, 3, 12.5, 4.2 + 0.17 * len(results))
    labels = [f"{result.name}\n{result.mix}\nwidth {result.width}" for result in results]
    groups = {
        "position (unseen tokens)": [result.position_probe for result in results],
        "token (unseen positions)": [result.token_probe for result in results],
    }
    for number, (label, group) in enumerate(groups.items()):
        x = [index + (number - 0.5) * 0.38 for index in range(len(results))]
        probes.bar(x, [probe.accuracy for probe in group], 0.38, label=label, color=color(number))
        chance = "chance" if number else None
        probes.scatter(x, [probe.chance for probe in group], marker="_", s=120, color="#000000", label=chance)
    probes.set(title="Linear probes", ylabel="accuracy", ylim=(0, 1.05))
    for number, kind in enumerate(("token", "position", "mixed")):
        x = [index + (number - 1) * 0.26 for index in range(len(results))]
        heights = [getattr(result, f"{kind}_dimension") for result in results]
        dimensions.bar(x, heights, 0.26, label=kind, color=color(number))
    dimensions.set(title="Effective dimension", ylabel="participation ratio")
    for axes in (probes, dimensions):
        axes.set_xticks(range(len(results)), labels, fontsize=8)
        legend_below(axes, 3)
    for number, result in enumerate(results):
        x = [(index + 0.5) / len(result.angles) for index in range(len(result.angles))]
        label = f"{result.name}, {result.mix}, width {result.width}"
        angles.plot(x, result.angles.tolist(), label=label, linewidth=1.6, **line_style(number))
        angles.plot(x, result.random_angles.tolist(), color=color(number), linewidth=0.8, linestyle=":")
    angles.set(
        title="Principal angles of tokens and positions\n(thin dotted lines: random subspaces)",
        xlabel="angles, smallest first (share)",
        ylabel="degrees",
        xlim=(0, 1),
        ylim=(0, 92),
    )
    legend_below(angles)
    return figure
