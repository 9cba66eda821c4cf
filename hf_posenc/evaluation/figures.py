"""Figures of an evaluation, in colours that the colour-blind tell apart. They take matplotlib: the extra `plots`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from .estimates import Estimate
from .results import OrderResult

if TYPE_CHECKING:
    from .report import Evaluation

COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#000000")
"""Okabe and Ito's palette, https://jfly.uni-koeln.de/color/."""
MARKERS = "os^Dv<>P"
HEAT = "cividis"


def _canvas(columns: int = 1, width: float = 6.4, height: float = 4.0) -> tuple[Any, list[Any]]:
    """A figure of its own, known to no window: it goes when the caller lets go of it."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError("figures take matplotlib: pip install hf_posenc[plots]") from None
    figure = Figure(figsize=(width * columns, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, list(figure.subplots(1, columns, squeeze=False)[0])


def _look(number: int) -> dict[str, Any]:
    return {"color": COLOURS[number % len(COLOURS)], "marker": MARKERS[number % len(MARKERS)], "markersize": 5}


def _line(axes: Any, places: list[float], estimates: list[Estimate], name: str, number: int) -> None:
    look = _look(number)
    axes.plot(places, [one.value for one in estimates], label=name, **look)
    known = [(place, one) for place, one in zip(places, estimates, strict=True) if one.low is not None]
    if known:
        lows, highs = [one.low for _, one in known], [one.high for _, one in known]
        axes.fill_between([place for place, _ in known], lows, highs, color=look["color"], alpha=0.2, linewidth=0)


def _plain_numbers(axes: Any) -> None:
    """200, not 2 x 10^2, and between powers of ten too where there is room."""
    from matplotlib.ticker import LogFormatter

    for which in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
        which(LogFormatter(minor_thresholds=(1.5, 0.6)))


def length_curve_figure(evaluation: Evaluation) -> Any:
    """Perplexity by length, with intervals; where a model ends, its line ends in a cross."""
    figure, (axes,) = _canvas()
    for number, model in enumerate(evaluation.models):
        results = [one for one in evaluation.perplexity if one.model == model]
        found = [(one.length, one.perplexity) for one in results if one.perplexity is not None]
        if found:
            _line(axes, [length for length, _ in found], [value for _, value in found], model, number)
            if any(one.stop for one in results):
                look = {**_look(number), "marker": "x", "markersize": 12, "markeredgewidth": 2.5}
                axes.plot([found[-1][0]], [found[-1][1].value], **look)
    axes.axvline(evaluation.trained_length, color="grey", linestyle=":", linewidth=1)
    axes.annotate(
        "trained length", (evaluation.trained_length, 1), xycoords=("data", "axes fraction"), fontsize=8, color="grey",
        xytext=(-3, -10), textcoords="offset points", ha="right",
    )  # fmt: skip
    axes.set(xscale="log", yscale="log", xlabel="length of the window in tokens", ylabel="perplexity")
    lengths = sorted({one.length for one in evaluation.perplexity})
    axes.set_xticks(lengths, [f"{length:,}" for length in lengths])
    axes.xaxis.minorticks_off()
    _plain_numbers(axes)
    axes.legend()
    return figure


def position_figure(evaluation: Evaluation, length: int | None = None) -> Any:
    """Perplexity by the place inside of the window, at one length: else the greatest that any model reaches."""
    reached = [one.length for one in evaluation.perplexity if one.positions]
    if length is None and reached:
        length = max(reached)
    figure, (axes,) = _canvas()
    for number, model in enumerate(evaluation.models):
        for one in evaluation.perplexity:
            if one.model == model and one.length == length and one.positions:
                middles = [(place.start + place.end) / 2 for place in one.positions]
                _line(axes, middles, [place.perplexity for place in one.positions], model, number)
    if length is not None and length > evaluation.trained_length:
        axes.axvline(evaluation.trained_length, color="grey", linestyle=":", linewidth=1)
    axes.set(yscale="log", xlabel=f"place in a window of {length or 0:,} tokens", ylabel="perplexity")
    _plain_numbers(axes)
    if reached:
        axes.legend()
    return figure


def passkey_figure(evaluation: Evaluation, value: str = "accuracy") -> Any:
    """A heat map for each model: length across, depth downwards, the share of keys found (or `preference`)."""
    if value not in ("accuracy", "preference"):
        raise ValueError(f"a heat map shows accuracy or preference, not {value!r}")
    figure, panels = _canvas(len(evaluation.models), width=4.2, height=3.6)
    lengths = sorted({one.length for one in evaluation.passkey})
    depths = sorted({cell.depth for one in evaluation.passkey for cell in one.depths})
    image = None
    for axes, model in zip(panels, evaluation.models, strict=True):
        heat = [[float("nan")] * len(lengths) for _ in depths]
        for one in (found for found in evaluation.passkey if found.model == model):
            for cell in one.depths:
                heat[depths.index(cell.depth)][lengths.index(one.length)] = getattr(cell, value).value
            if one.stop:
                axes.text(lengths.index(one.length), (len(depths) - 1) / 2, "ends", ha="center", rotation=90)
        if depths:
            image = axes.imshow(heat, vmin=0, vmax=1, cmap=HEAT, aspect="auto")
        axes.set(title=model, xlabel="tokens", ylabel="depth of the key")
        axes.set_xticks(range(len(lengths)), [f"{length:,}" for length in lengths], rotation=45)
        axes.set_yticks(range(len(depths)), [f"{depth:.0%}" for depth in depths])
    if image is not None:
        label = "keys found" if value == "accuracy" else "key preferred to another (half is chance)"
        figure.colorbar(image, ax=panels, label=label)
    return figure


def order_figure(evaluation: Evaluation) -> Any:
    """Nats that shuffling costs, by the size of the blocks, at the greatest length of each model."""
    figure, (axes,) = _canvas()
    blocks: list[int | None] = []
    for number, model in enumerate(evaluation.models):
        results: list[OrderResult] = [one for one in evaluation.order if one.model == model and one.shuffles]
        if results:
            last = max(results, key=lambda one: one.length)
            blocks = [cell.block for cell in last.shuffles]
            places = [float(place) for place in range(len(blocks))]
            _line(axes, places, [cell.increase for cell in last.shuffles], f"{model}, {last.length:,} tokens", number)
    axes.axhline(0, color="grey", linewidth=0.8)
    axes.set_xticks(range(len(blocks)), ["all" if block is None else str(block) for block in blocks])
    axes.set(xlabel="tokens shuffled among each other", ylabel="nats lost a token")
    if blocks:
        axes.legend()
    return figure


def write_figures(evaluation: Evaluation, directory: str | Path) -> list[Path]:
    """A PNG for each measure that there is."""
    found = {}
    if evaluation.perplexity:
        found = {"length_curve": length_curve_figure(evaluation), "positions": position_figure(evaluation)}
    if evaluation.passkey:
        found["passkey"] = passkey_figure(evaluation)
        found["passkey_preference"] = passkey_figure(evaluation, "preference")
    if evaluation.order:
        found["order"] = order_figure(evaluation)
    Path(directory).mkdir(parents=True, exist_ok=True)
    paths = []
    for name, figure in found.items():
        paths.append(Path(directory) / f"{name}.png")
        figure.savefig(paths[-1], dpi=150)
    return paths
