"""Shared look of all figures: color-blind safe palettes, figures without pyplot's global state, saving to files.

matplotlib is an optional dependency and is only imported when a figure is drawn.
"""

from __future__ import annotations

import io
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

from ..errors import PosEncError, install_command

if TYPE_CHECKING:
    import numpy as np
    import torch
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000", "#F0E442")
"""The Okabe-Ito palette, distinguishable with any color vision; yellow comes last because it is faint on white."""
LINE_STYLES = ("-", "--", "-.", ":")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
SEQUENTIAL_CMAP = "cividis"
INDEX_CMAP = "viridis"
"""For integers that identify something, such as rows of a table."""
DIVERGING_CMAP = "PuOr"
"""For signed values, white at zero."""
CLIP_QUANTILE, OUTLIER_RATIO = 0.995, 1.5
"""Diverging heat maps are clipped at this quantile if the maximum exceeds it by this ratio."""
FIGURE_WIDTH = 7.0
"""In inches, of figures with several panels. Wider ones have illegible text where they are scaled to a phone."""
MAX_PANEL_HEIGHT = 10.0
"""In inches, of heat maps with a row per head: large models have thousands of them."""
FIGURE_FORMATS = (".png", ".svg", ".pdf")


class LineStyle(TypedDict):
    """Keyword arguments for `Axes.plot`."""

    color: str
    linestyle: str


def new_figure(width: float, height: float) -> Figure:
    """An empty figure, in inches; raises PosEncError with install instructions if matplotlib is missing."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise PosEncError(f"plotting needs matplotlib: {install_command('plots')}") from error
    return Figure(figsize=(width, height), layout="constrained")


def subplots(rows: int, columns: int, width: float, height: float) -> tuple[Figure, list[Axes]]:
    """A figure with a grid of axes, in row-major order."""
    figure = new_figure(width, height)
    return figure, list(figure.subplots(rows, columns, squeeze=False).flat)


def panel_grid(count: int, height: float, columns: int = 2) -> tuple[Figure, list[Axes]]:
    """A figure with panels of equal size, `height` inches high and few per row: text stays legible on a phone."""
    columns = min(count, columns)
    rows = -(-count // columns)
    figure, panels = subplots(rows, columns, FIGURE_WIDTH, rows * height)
    for axes in panels[count:]:
        axes.remove()
    return figure, panels[:count]


def color(index: int) -> str:
    """The color of the series with this index."""
    return COLORS[index % len(COLORS)]


def marker(index: int) -> str:
    """The marker of the series with this index."""
    return MARKERS[index % len(MARKERS)]


def line_style(index: int) -> LineStyle:
    """Color and dash pattern of a line; the first 32 are distinct, and neighbors differ in both."""
    return {"color": color(index), "linestyle": LINE_STYLES[(index + index // len(COLORS)) % len(LINE_STYLES)]}


def draw_heatmap(
    axes: Axes,
    matrix: np.ndarray,
    label: str,
    cmap: str = SEQUENTIAL_CMAP,
    limits: tuple[float, float] | None = None,
    extend: str = "neither",
) -> None:
    """Draw a heat map with a color bar, by default from the lowest to the highest value."""
    vmin, vmax = limits or (None, None)
    image = axes.imshow(matrix, cmap=cmap, vmin=vmin, vmax=vmax, aspect="auto", interpolation="nearest")
    axes.figure.colorbar(image, ax=axes, label=label, extend=extend)


def draw_diverging(axes: Axes, matrix: np.ndarray, label: str) -> None:
    """Draw a heat map of signed values, centered at zero; a few outliers do not wash out the rest."""
    magnitudes = sorted(abs(matrix).flatten().tolist())
    limit, clipped = magnitudes[-1] or 1.0, magnitudes[int(CLIP_QUANTILE * (len(magnitudes) - 1))]
    if 0 < OUTLIER_RATIO * clipped < limit:
        limit = clipped
    extend = "both" if limit < magnitudes[-1] else "neither"
    draw_heatmap(axes, matrix, label, DIVERGING_CMAP, (-limit, limit), extend)


def draw_heads(
    names: Sequence[str], shares: Sequence[torch.Tensor], label: str, layers: Sequence[int] | None = None
) -> tuple[Figure, list[Axes]]:
    """Heat maps of (layers, heads, columns), one row per head; for two of them, also the change."""
    num_layers, num_heads = shares[0].shape[:2]
    height = min(max(3.2, 1.6 + 0.09 * num_layers * num_heads), MAX_PANEL_HEIGHT)
    figure, panels = panel_grid(len(shares) + (len(shares) == 2), height, columns=1)
    highest = max(float(share.max()) for share in shares)
    for axes, name, share in zip(panels, names, shares, strict=False):
        draw_heatmap(axes, share.flatten(0, 1).numpy(), label, limits=(0.0, highest))
        axes.set_title(name)
    if len(shares) == 2:
        draw_diverging(panels[2], (shares[1] - shares[0]).flatten(0, 1).numpy(), f"change of {label}")
        panels[2].set_title("change")
    labelled = range(0, num_layers, -(-num_layers // 24))
    for axes in panels:
        for layer in range(1, num_layers):
            axes.axhline(layer * num_heads - 0.5, color="0.75", linewidth=0.8)
        centers = [layer * num_heads + (num_heads - 1) / 2 for layer in labelled]
        axes.set_yticks(centers, [f"layer {(layers or range(num_layers))[layer]}" for layer in labelled])
        axes.set_ylabel("one row per head")
    return figure, panels


def spread_ticks(size: int, count: int) -> list[int]:
    """At most `count` indices spread evenly over `size`."""
    return sorted({round(step * (size - 1) / (count - 1)) for step in range(count)})


def check_not_empty(results: Sequence[object]) -> None:
    if not results:
        raise PosEncError("expected at least one result to draw")


def legend_outside(figure: Figure, axes: Axes, columns: int = 1) -> None:
    """Put the legend to the right of the axes, where it hides no data."""
    handles, labels = axes.get_legend_handles_labels()
    if handles:
        figure.legend(handles, labels, loc="outside right upper", fontsize=8, ncols=columns)


def legend_below(axes: Axes, columns: int = 1) -> None:
    """Put the legend below the axes, where long labels fit."""
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.24), fontsize=8, ncols=columns, frameon=False)


def check_figure_path(path: str | Path) -> None:
    """Refuse files of other formats; call it before measuring anything."""
    if Path(path).suffix.lower() not in FIGURE_FORMATS:
        raise PosEncError(f"Unknown figure format of {path}; expected a file ending in {', '.join(FIGURE_FORMATS)}")


def save_figure(figure: Figure, path: str | Path) -> Path:
    """Write a figure to a file, completely or not at all, creating parent directories as needed.

    Args:
        figure: A figure returned by a function of `hf_posenc.plots`.
        path: Output file ending in .png, .svg or .pdf.

    Returns:
        The path that was written.

    Raises:
        PosEncError: If the extension is unknown or the file cannot be written.
    """
    from ..checkpoints import fsync, temporary_name  # only here, because it imports torch

    check_figure_path(path)
    path, temporary, content = Path(path), None, io.BytesIO()
    figure.savefig(content, dpi=150, format=path.suffix[1:].lower())  # in memory: on a full disk, it raises all sorts
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        target = path.resolve()
        temporary = target.with_name(temporary_name(target.name, os.getpid()))
        temporary.write_bytes(content.getvalue())
        fsync(temporary)
        temporary.replace(target)
    except (OSError, RuntimeError) as error:  # RuntimeError: a link to itself
        raise PosEncError(f"Cannot write the figure: {error}") from error
    finally:
        if temporary is not None:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
    return path
