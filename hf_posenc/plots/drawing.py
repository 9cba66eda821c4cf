"""What all figures share: colours that everyone can tell apart, figures without global state, and files.

Matplotlib is an optional extra, imported when something is drawn. `pyplot` is not used: its figures live until closed.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000", "#F0E442")
"""Okabe and Ito's palette, told apart with any colour vision; yellow last, as it is faint on white."""
STYLES = ("-", "--", "-.", ":")
"""Of lines, in turn with the colours, so that no line is known by its colour alone."""
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
LEVELS = "cividis"
"""The colour map of amounts: even steps of lightness, the same for colour-blind eyes."""
STEPS = "viridis"
"""The colour map of numbers that only name something, as rows of a table do."""
SIGNED = "PuOr"
"""The colour map of signed amounts, white at zero: orange and purple are told apart with any colour vision."""
SHOWN, BEYOND = 0.995, 1.5
"""Of signed amounts, the share that has colours of its own where the highest is this many times beyond it."""
FORMATS = (".png", ".svg", ".pdf")


def new_figure(width: float, height: float) -> Figure:
    """An empty figure, in inches."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValueError("drawing needs matplotlib, which is not installed: pip install hf_posenc[plots]") from error
    return Figure(figsize=(width, height), layout="constrained")


def panels(rows: int, columns: int, width: float, height: float) -> tuple[Figure, list[Axes]]:
    """A figure with a grid of axes, row by row."""
    figure = new_figure(width, height)
    return figure, list(figure.subplots(rows, columns, squeeze=False).flat)


def colour_of(number: int) -> str:
    return COLOURS[number % len(COLOURS)]


def line_look(number: int) -> dict[str, Any]:
    """Colour and style of the line with this number: no two of the first 32 look the same, nor neighbours in grey."""
    return {"color": colour_of(number), "linestyle": STYLES[(number + number // len(COLOURS)) % len(STYLES)]}


def draw_signed(axes: Axes, matrix: Any, label: str, **extent: Any) -> Any:
    """A heat map of signed amounts, with zero in the middle of its colours; the few highest share the last colour."""
    sizes = sorted(abs(matrix).flatten().tolist())
    high, highest = sizes[int(SHOWN * (len(sizes) - 1))], sizes[-1] or 1.0
    if 0 < BEYOND * high < highest:
        highest = high
    image = axes.imshow(
        matrix, cmap=SIGNED, vmin=-highest, vmax=highest, aspect="auto", interpolation="nearest", **extent
    )
    axes.figure.colorbar(image, ax=axes, label=label, extend="both" if highest < sizes[-1] else "neither")
    return image


def draw_levels(axes: Axes, matrix: Any, label: str, cmap: str = LEVELS, **extent: Any) -> Any:
    """A heat map of amounts from their lowest to their highest."""
    image = axes.imshow(matrix, cmap=cmap, aspect="auto", interpolation="nearest", **extent)
    axes.figure.colorbar(image, ax=axes, label=label)
    return image


def refuse_format(path: Path) -> None:
    """Raise ValueError for a file that no figure is written to: before anything is measured for it."""
    if path.suffix.lower() not in FORMATS:
        raise ValueError(f"a figure is written to a file that ends in {', '.join(FORMATS)}; got {path.name!r}")


def name_beside(figure: Figure, axes: Axes) -> None:
    """The names of what is drawn, beside the picture: inside of it they would hide some of that."""
    if axes.get_legend_handles_labels()[0]:
        figure.legend(*axes.get_legend_handles_labels(), loc="outside right upper", fontsize=8)


def name_below(axes: Axes, columns: int = 1) -> None:
    """The same below the axes, where long names have room."""
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.24), fontsize=8, ncols=columns, frameon=False)


def directory_for(path: Path) -> None:
    """Make a directory for figures, or raise ValueError."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"{path} cannot be a directory for figures: {error}") from error


def save(figure: Figure, path: str | Path, dpi: int = 110) -> Path:
    """Write a figure to a .png, .svg or .pdf file, in directories that are made if they are not there."""
    path = Path(path)
    refuse_format(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=dpi)
    except OSError as error:
        raise ValueError(f"the figure cannot be written: {error}") from error
    return path
