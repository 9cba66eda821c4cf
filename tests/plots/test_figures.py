"""Figures show exactly what was measured, in color-blind safe colors."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.lines import Line2D

from hf_posenc import PosEncError, analysis, plots
from hf_posenc.errors import install_command
from tests.support.tiny_models import model, tokens

OKABE_ITO = {"#000000", "#e69f00", "#56b4e9", "#009e73", "#f0e442", "#0072b2", "#d55e00", "#cc79a7"}
SAFE_CMAPS = {"cividis", "viridis", "PuOr"}


def is_safe(color: object) -> bool:
    """In the palette, or gray."""
    code = to_hex(color)
    return code in OKABE_ITO or code[1:3] == code[3:5] == code[5:7]


PHONE = 390
"""Pixels across."""


def panels(figure: Figure) -> list[Axes]:
    return [axes for axes in figure.axes if axes.get_label() != "<colorbar>"]


def heatmaps(figure: Figure) -> list[AxesImage]:
    return [image for axes in panels(figure) for image in axes.get_images()]


def labelled_lines(axes: Axes) -> list[Line2D]:
    return [line for line in axes.get_lines() if not line.get_label().startswith("_")]


def assert_safe(figure: Figure) -> None:
    colors = [line.get_color() for axes in panels(figure) for line in axes.get_lines()]
    colors += [patch.get_facecolor() for axes in panels(figure) for patch in axes.patches]
    colors += [face for axes in panels(figure) for dots in axes.collections for face in dots.get_facecolor()]
    cmaps = {image.get_cmap().name for image in heatmaps(figure)}
    assert colors or cmaps
    assert all(map(is_safe, colors))
    assert cmaps <= SAFE_CMAPS


def same(drawn: object, measured: torch.Tensor) -> bool:
    return torch.allclose(torch.as_tensor(drawn).double(), measured.double())


def test_unsafe_colors_are_detected() -> None:
    assert not is_safe("#ff0000")


def test_position_embeddings() -> None:
    embeddings = analysis.position_embeddings(analysis.build_model("sinusoidal"), 40)
    figure = plots.position_embeddings(embeddings)
    (image,) = heatmaps(figure)
    assert same(image.get_array(), embeddings.table)
    assert image.get_clim() == (-1, 1)  # zero is white
    assert_safe(figure)
    embeddings.table[0, 0] = 100.0
    (image,) = heatmaps(plots.position_embeddings(embeddings))
    assert image.get_clim()[1] < 2  # an outlier does not wash out the rest


def test_feature_ranges() -> None:
    results = [analysis.position_embeddings(analysis.build_model(name), 40) for name in ("sinusoidal", "polynomial")]
    figure = plots.feature_ranges(*results)
    *lines, threshold = labelled_lines(figure.axes[0])
    assert threshold.get_ydata()[0] == pytest.approx(0.05)
    for line, embeddings in zip(lines, results, strict=True):
        assert same(line.get_ydata(), embeddings.ranges / embeddings.reference_range)
        assert f"{int(embeddings.static.sum())} of 64" in line.get_label()
    assert_safe(figure)


def test_relative_buckets() -> None:
    results = [analysis.relative_buckets(analysis.build_model(name), 30) for name in ("t5", "shaw")]
    figure = plots.relative_buckets(*results)
    for image, buckets in zip(heatmaps(figure), results, strict=True):
        assert same(image.get_array(), buckets.index)
    assert_safe(figure)


def test_bias_by_distance() -> None:
    bias = analysis.bias_by_distance(analysis.build_model("alibi", hidden_size=48, num_heads=12), 30)
    figure = plots.bias_by_distance(bias)
    lines = labelled_lines(figure.axes[0])
    for line, values in zip(lines, bias.values, strict=True):
        assert same(line.get_ydata(), values)
        assert same(line.get_xdata(), bias.distances)
    assert len({(line.get_color(), line.get_linestyle()) for line in lines}) == 12
    assert_safe(figure)


def test_rotary_decay() -> None:
    results = [analysis.rotary_decay(analysis.build_model(name), 30) for name in ("rope", "xpos")]
    figure = plots.rotary_decay(*results)
    for line, decay in zip(labelled_lines(figure.axes[0]), results, strict=True):
        assert same(line.get_ydata(), decay.similarity)
    (image,) = heatmaps(figure)
    assert same(image.get_array(), results[0].similarity_by_pair)
    assert_safe(figure)


def test_separability() -> None:
    subject = analysis.build_model("sinusoidal", hidden_size=32, num_heads=2)
    results = [analysis.separability(subject, unmixed=unmixed, rows=64) for unmixed in (False, True)]
    figure = plots.separability(*results)
    probes, dimensions, angles = figure.axes
    accuracies = [result.position_probe.accuracy for result in results]
    accuracies += [result.token_probe.accuracy for result in results]
    assert [bar.get_height() for bar in probes.patches] == accuracies
    assert len(dimensions.patches) == 6
    assert dimensions.patches[0].get_height() == results[0].token_dimension
    for line, result in zip(labelled_lines(angles), results, strict=True):
        assert same(line.get_ydata(), result.angles)
    assert_safe(figure)
    without_angles = analysis.separability(analysis.build_model("none", hidden_size=32, num_heads=2), rows=64)
    assert plots.separability(without_angles).axes


def test_schemes_side_by_side() -> None:
    sizes = {"alibi": 4, "sandwich": 8}
    biases = [
        analysis.bias_by_distance(analysis.build_model(name, hidden_size=32, num_heads=heads), 20)
        for name, heads in sizes.items()
    ]
    figure = plots.bias_by_distance(*biases)
    assert [len(axes.get_lines()) - 1 for axes in figure.axes] == list(sizes.values())
    assert len(figure.legends[0].get_texts()) == 8
    for axes, bias in zip(figure.axes, biases, strict=True):
        assert axes.get_lines()[0].get_ydata().tolist() == bias.values[0].tolist()
        assert axes.get_title().startswith(bias.name)
    tables = [analysis.position_embeddings(analysis.build_model(name), 12) for name in ("sinusoidal", "polynomial")]
    assert len(heatmaps(plots.position_embeddings(*tables))) == 2


def test_many_panels_stay_narrow() -> None:
    """Figures are scaled to the width of a page or phone, so wide ones have small text."""
    bias = analysis.bias_by_distance(analysis.build_model("alibi"), 20)
    table = analysis.position_embeddings(analysis.build_model("sinusoidal"), 12)
    rotation = analysis.rotary_decay(analysis.build_model("rope"), 20)
    figures = [plots.bias_by_distance(*[bias] * 4), plots.position_embeddings(*[table] * 3)]
    figures += [plots.rotary_decay(rotation, rotation)]
    attention = analysis.attention_by_distance(model("gpt2"), tokens(2, 12))
    frequencies = analysis.rotary_frequencies(model("llama", dtype=torch.float32), tokens(1, 9))
    for draw, result in ((plots.attention_by_distance, attention), (plots.rotary_frequencies, frequencies)):
        figures += [draw(*[result] * count) for count in (1, 2, 4)]
    for figure, count in zip(figures, (4, 3, 2, 1, 3, 4, 1, 3, 4), strict=True):
        assert len(panels(figure)) == count
        width = figure.get_size_inches()[0]
        assert 10 / 72 / width * PHONE > 7, "a font of 10 points, in pixels on a phone"


def test_token_clusters() -> None:
    clusters = analysis.token_clusters(analysis.build_model("sinusoidal"), 20, length=16)
    figure = plots.token_clusters(clusters)
    plane, spread = figure.axes
    assert len(plane.collections) == 7  # one color each
    for points, dots in zip(clusters.projection, plane.collections, strict=False):
        assert same(dots.get_offsets(), points)
    measured = torch.stack([clusters.nearest_distance, clusters.spread], dim=1)
    assert same(spread.collections[0].get_offsets(), measured)
    assert_safe(figure)


def test_attention_by_distance() -> None:
    before, after = (
        analysis.attention_by_distance(model("gpt2", scheme), tokens(2, 12), name)
        for scheme, name in ((None, "stock"), ("alibi", "alibi"))
    )
    (image,) = heatmaps(plots.attention_by_distance(before))
    assert same(image.get_array(), before.binned()[1].flatten(0, 1))
    figure = plots.attention_by_distance(before, after)
    assert same(heatmaps(figure)[2].get_array(), (after.binned()[1] - before.binned()[1]).flatten(0, 1))
    assert heatmaps(figure)[2].get_cmap().name == "PuOr"
    assert [axes.get_title() for axes in panels(figure)] == ["stock", "alibi", "change"]
    assert_safe(figure)
    four = plots.attention_by_distance(before, after, after, before)
    assert [axes.get_title() for axes in panels(four)] == ["stock", "alibi", "alibi", "stock"]
    for image, result in zip(heatmaps(four), (before, after, after, before), strict=True):
        assert same(image.get_array(), result.binned()[1].flatten(0, 1))
    with pytest.raises(PosEncError, match="layers and heads"):
        plots.attention_by_distance(before, analysis.attention_by_distance(model("gpt2", n_layer=2), tokens(2, 12)))
    with pytest.raises(PosEncError, match="same length"):
        plots.attention_by_distance(before, analysis.attention_by_distance(model("gpt2"), tokens(2, 9)))


def test_rotary_frequencies() -> None:
    before = analysis.rotary_frequencies(model("llama", dtype=torch.float32), tokens(1, 9))
    figure = plots.rotary_frequencies(before)
    assert same(heatmaps(figure)[0].get_array(), before.share.flatten(0, 1))
    assert_safe(figure)
    slower = model("llama", {"type": "rope", "theta": 500.0}, torch.float32)
    after = analysis.rotary_frequencies(slower, tokens(1, 9))
    figure = plots.rotary_frequencies(before, after)
    assert same(heatmaps(figure)[2].get_array(), (after.share - before.share).flatten(0, 1))
    first, second = (axes.get_xticklabels()[-1].get_text() for axes in panels(figure)[:2])
    assert first != second
    partial = model("llama", {"type": "rope", "partial_rotary_factor": 0.5}, torch.float32)
    with pytest.raises(PosEncError, match="number of pairs"):
        plots.rotary_frequencies(before, analysis.rotary_frequencies(partial, tokens(1, 9)))


@pytest.mark.parametrize(
    "name",
    [
        "attention_by_distance",
        "feature_ranges",
        "relative_buckets",
        "rotary_decay",
        "rotary_frequencies",
        "separability",
    ],
)
def test_nothing_to_draw(name: str) -> None:
    with pytest.raises(PosEncError, match="at least one"):
        getattr(plots, name)()


@pytest.mark.parametrize("extension", [".png", ".svg", ".pdf"])
def test_figures_are_saved(tmp_path: Path, extension: str) -> None:
    figure = plots.position_embeddings(analysis.position_embeddings(analysis.build_model("sinusoidal"), 8))
    path = plots.save_figure(figure, tmp_path / "new" / f"figure{extension}")
    assert path.stat().st_size > 1000
    assert [file.name for file in path.parent.iterdir()] == [path.name]
    with pytest.raises(PosEncError, match=r"\.png, \.svg, \.pdf"):
        plots.save_figure(figure, tmp_path / "figure.bmp")


def test_plots_import_neither_torch_nor_pyplot() -> None:
    """In a fresh process, because other tests may have imported them here."""
    code = (
        "import sys, types, numpy\n"
        "from hf_posenc import plots\n"
        "assert not {'torch', 'matplotlib'} & set(sys.modules)\n"
        "bias = types.SimpleNamespace(name='', query=None, distances=numpy.arange(3), values=numpy.eye(3))\n"
        "assert len(plots.bias_by_distance(bias).axes) == 1\n"
        "assert 'matplotlib.figure' in sys.modules and 'matplotlib.pyplot' not in sys.modules\n"
    )
    root = Path(__file__).parents[2]
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=root)
    assert process.returncode == 0, process.stderr


def test_missing_matplotlib_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(PosEncError, match=re.escape(install_command("plots"))):
        plots.rotary_decay(analysis.rotary_decay(analysis.build_model("rope"), 9))
