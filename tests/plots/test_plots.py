"""The figures: what is drawn is what was measured, in colours that everyone can tell apart; and `hf-posenc plot`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner

import hf_posenc
from hf_posenc import analysis, plots
from hf_posenc.cli import app
from hf_posenc.plots import style
from tests.support.tiny_models import model, tokens

OKABE_ITO = {"#000000", "#e69f00", "#56b4e9", "#009e73", "#f0e442", "#0072b2", "#d55e00", "#cc79a7"}
SAFE_MAPS = {"cividis", "viridis", "PuOr"}
ROOT = Path(__file__).parents[2]


def is_safe(colour: Any) -> bool:
    """One of the palette, or a grey."""
    found = to_hex(colour)
    return found in OKABE_ITO or found[1:3] == found[3:5] == found[5:7]


def images(figure: Figure) -> list[Any]:
    """Heat maps, without the colour bars beside them."""
    return [image for axes in figure.axes for image in axes.get_images() if axes.get_label() != "<colorbar>"]


def all_are_safe(figure: Figure) -> bool:
    drawn = [axes for axes in figure.axes if axes.get_label() != "<colorbar>"]
    lines = [is_safe(line.get_color()) for axes in drawn for line in axes.get_lines()]
    patches = [is_safe(patch.get_facecolor()) for axes in drawn for patch in axes.patches]
    dots = [is_safe(colour) for axes in drawn for found in axes.collections for colour in found.get_facecolor()]
    maps = [image.get_cmap().name in SAFE_MAPS for image in images(figure)]
    assert lines or patches or dots or maps
    return all([*lines, *patches, *dots, *maps])


def same(drawn: Any, data: torch.Tensor) -> bool:
    return torch.allclose(torch.as_tensor(drawn).double(), data.double())


def labelled(axes: Any) -> list[Any]:
    return [line for line in axes.get_lines() if not line.get_label().startswith("_")]


def test_encoding() -> None:
    data = analysis.encoding(analysis.scheme_model("sinusoidal"), 40)
    figure = plots.encoding(data)
    (image,) = images(figure)
    assert same(image.get_array(), data.table)
    low, high = image.get_clim()
    assert low == -high == -1  # zero is white
    assert all_are_safe(figure)
    data.table[0, 0] = 100.0
    (image,) = images(plots.encoding(data))
    assert image.get_clim()[1] < 2  # one value far beyond the rest does not make all of them white


def test_movement() -> None:
    data = [
        analysis.movement(analysis.encoding(analysis.scheme_model(name), 40)) for name in ("sinusoidal", "polynomial")
    ]
    figure = plots.movement(*data)
    *drawn, threshold = labelled(figure.axes[0])
    assert len(drawn) == 2
    assert threshold.get_ydata()[0] == pytest.approx(0.05)
    for line, moved in zip(drawn, data, strict=True):
        assert same(line.get_ydata(), moved.ranges / moved.wide)
        assert f"{int(moved.still.sum())} of 64" in line.get_label()
    assert all_are_safe(figure)


def test_relative() -> None:
    data = [analysis.relative_rows(analysis.scheme_model(name), 30) for name in ("t5", "shaw")]
    figure = plots.relative(*data)
    assert len(images(figure)) == 2
    for image, rows in zip(images(figure), data, strict=True):
        assert same(image.get_array(), rows.index)
    assert all_are_safe(figure)


def test_bias() -> None:
    data = analysis.bias_by_distance(analysis.scheme_model("alibi", width=48, heads=12), 30)
    figure = plots.bias(data)
    drawn = labelled(figure.axes[0])
    assert len(drawn) == 12
    for line, values in zip(drawn, data.values, strict=True):
        assert same(line.get_ydata(), values)
        assert same(line.get_xdata(), data.distances)
    assert len({(line.get_color(), line.get_linestyle()) for line in drawn}) == 12
    assert all_are_safe(figure)


def test_decay() -> None:
    data = [analysis.decay(analysis.scheme_model(name), 30) for name in ("rope", "xpos")]
    figure = plots.decay(*data)
    for line, found in zip(labelled(figure.axes[0]), data, strict=True):
        assert same(line.get_ydata(), found.similarity)
    (image,) = images(figure)
    assert same(image.get_array(), data[0].by_pair)
    assert all_are_safe(figure)


def test_separation() -> None:
    subject = analysis.scheme_model("sinusoidal", width=32, heads=2)
    data = [analysis.separation(subject, side_by_side=side, rows=64) for side in (False, True)]
    figure = plots.separation(*data)
    read, filled, angled = figure.axes
    heights = [patch.get_height() for patch in read.patches]
    assert heights == [found.position.accuracy for found in data] + [found.token.accuracy for found in data]
    assert len(filled.patches) == 6
    assert filled.patches[0].get_height() == data[0].word_dimension
    for line, found in zip(labelled(angled), data, strict=True):
        assert same(line.get_ydata(), found.angles)
    assert all_are_safe(figure)
    silent = analysis.separation(analysis.scheme_model("none", width=32, heads=2), rows=64)
    assert plots.separation(silent).axes  # with no angle to draw


def test_clouds() -> None:
    data = analysis.clouds(analysis.scheme_model("sinusoidal"), 20, length=16)
    figure = plots.clouds(data, words=3)
    plane, apart = figure.axes
    assert len(plane.collections) == 3
    for points, drawn in zip(data.plane, plane.collections, strict=False):
        assert same(drawn.get_offsets(), points)
    assert same(apart.collections[0].get_offsets(), torch.stack([data.nearest, data.within], dim=1))
    assert all_are_safe(figure)
    with pytest.raises(ValueError, match="one word"):
        plots.clouds(data, words=0)


def test_attention() -> None:
    before, after = (
        analysis.attention_by_distance(model("gpt2", scheme), tokens(2, 12), name)
        for scheme, name in ((None, "stock"), ("alibi", "alibi"))
    )
    alone = plots.attention(before)
    assert same(images(alone)[0].get_array(), before.binned()[1].flatten(0, 1))
    both = plots.attention(before, after)
    assert len(images(both)) == 3
    difference = (after.binned()[1] - before.binned()[1]).flatten(0, 1)
    assert same(images(both)[2].get_array(), difference)
    assert images(both)[2].get_cmap().name == "PuOr"
    assert [axes.get_title() for axes in both.axes[:3]] == ["stock", "alibi", "change"]
    assert all_are_safe(both)
    with pytest.raises(ValueError, match="layers and heads"):
        plots.attention(before, analysis.attention_by_distance(model("gpt2", n_layer=2), tokens(2, 12)))
    with pytest.raises(ValueError, match="same length"):
        plots.attention(before, analysis.attention_by_distance(model("gpt2"), tokens(2, 9)))


def test_frequencies() -> None:
    data = analysis.frequencies(model("llama", dtype=torch.float32), tokens(1, 9))
    figure = plots.frequencies(data)
    assert same(images(figure)[0].get_array(), data.share.flatten(0, 1))
    assert all_are_safe(figure)
    other = analysis.frequencies(model("llama", {"type": "rope", "theta": 500.0}, torch.float32), tokens(1, 9))
    both = plots.frequencies(data, other)
    assert same(images(both)[2].get_array(), (other.share - data.share).flatten(0, 1))
    assert both.axes[0].get_xticklabels()[-1].get_text() != both.axes[1].get_xticklabels()[-1].get_text()
    assert all_are_safe(both)
    half = {"type": "rope", "partial_rotary_factor": 0.5}
    with pytest.raises(ValueError, match="as many pairs"):
        plots.frequencies(data, analysis.frequencies(model("llama", half, torch.float32), tokens(1, 9)))


def test_nothing_to_draw() -> None:
    for function in (plots.movement, plots.relative, plots.decay, plots.separation):
        with pytest.raises(ValueError, match="at least one"):
            function()


def test_palettes_are_what_they_say() -> None:
    assert {colour.lower() for colour in style.COLORS} == OKABE_ITO
    looks = [tuple(style.line_style(number).values()) for number in range(32)]
    assert len(set(looks)) == 32
    assert not is_safe("#ff0000")  # the check above can fail


@pytest.mark.parametrize("ending", [".png", ".svg", ".pdf"])
def test_files(tmp_path: Path, ending: str) -> None:
    figure = plots.encoding(analysis.encoding(analysis.scheme_model("sinusoidal"), 8))
    path = plots.save_figure(figure, tmp_path / "made" / f"figure{ending}")
    assert path.stat().st_size > 1000
    with pytest.raises(ValueError, match=r"\.png, \.svg, \.pdf"):
        plots.save_figure(figure, tmp_path / "figure.bmp")


def test_no_global_state_and_no_matplotlib_before_it_is_needed() -> None:
    """In a process of its own: others here may have imported pyplot."""
    code = (
        "import sys, types, numpy\n"
        "from hf_posenc import plots\n"
        "assert not {'torch', 'matplotlib'} & set(sys.modules)\n"
        "data = types.SimpleNamespace(name='', query=None, distances=numpy.arange(3), values=numpy.eye(3))\n"
        "assert len(plots.bias(data).axes) == 1\n"
        "assert 'matplotlib.figure' in sys.modules and 'matplotlib.pyplot' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr


def test_without_matplotlib(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    data = analysis.decay(analysis.scheme_model("rope"), 9)
    with pytest.raises(ValueError, match=r"pip install hf_posenc\[plots\]"):
        plots.decay(data)
    done = CliRunner().invoke(app, ["plot", "decay", "--scheme", "rope", "--out", str(tmp_path / "x.png")])
    assert done.exit_code == 2
    assert "hf_posenc[plots]" in done.output
    numbers = CliRunner().invoke(app, ["plot", "decay", "--scheme", "rope", "--length", "9", "--json"])
    assert numbers.exit_code == 0


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["plot", *arguments])


@pytest.mark.parametrize(
    ("what", "schemes"),
    [
        ("encoding", ["sinusoidal"]),
        ("movement", ["sinusoidal", "polynomial"]),
        ("relative", ["t5", '{"type": "shaw", "max_distance": 4}']),
        ("bias", ["alibi"]),
        ("decay", ["rope", "xpos"]),
        ("separation", ["sinusoidal"]),
        ("clouds", ["sinusoidal"]),
    ],
)
def test_command_for_schemes(tmp_path: Path, what: str, schemes: list[str]) -> None:
    asked = [what, *(part for scheme in schemes for part in ("--scheme", scheme)), "--length", "24"]
    done = run(*asked, "--out", str(tmp_path / "figure.svg"))
    assert done.exit_code == 0, done.output
    assert (tmp_path / "figure.svg").exists()
    assert "written to" in done.output
    numbers = json.loads(run(*asked, "--json").output)
    assert numbers["what"] == what
    assert len(numbers["found"]) == len(schemes)
    assert numbers["found"][0]["summary"] in done.output


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A tiny GPT-2 with a tokenizer of its own, and a text."""
    words = {f"w{number}": number for number in range(61)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w0").save_pretrained(tmp_path / "stock")
    model("gpt2", dtype=torch.float32).save_pretrained(tmp_path / "stock")
    (tmp_path / "text.txt").write_text(" ".join(f"w{number * 7 % 61}" for number in range(300)))
    return tmp_path


def test_command_for_a_checkpoint(checkpoint: Path) -> None:
    stock, text, out = str(checkpoint / "stock"), str(checkpoint / "text.txt"), str(checkpoint / "figure.png")
    asked = ["attention", "--model", stock, "--data", text, "--length", "20", "--rows", "3"]
    done = run(*asked, "--scheme", "alibi", "--out", out)
    assert done.exit_code == 0, done.output
    found = json.loads(run(*asked, "--json").stdout)["found"]
    ids = analysis.token_rows(stock, checkpoint / "text.txt", 20, 3)
    assert ids.shape == (3, 20)
    right = analysis.attention_by_distance(analysis.checkpoint_model(stock), ids)
    assert torch.allclose(torch.tensor(found[0]["share"], dtype=torch.float64), right.share)
    whole = run("encoding", "--model", stock, "--out", out)  # no longer than its table, unless asked
    assert "48 positions" in whole.output, whole.output
    used = ["frequencies", "--model", stock, "--data", text, "--length", "20", "--rows", "2"]
    alone = run(*used, "--scheme", "rope", "--out", out)  # a stock GPT-2 turns nothing: there is no before
    assert alone.exit_code == 0
    assert "left out: nothing is turned" in alone.output
    assert run(*used, "--out", out).exit_code == 2
    cloud = json.loads(run("clouds", "--model", stock, "--length", "5", "--json").stdout)["found"][0]
    assert cloud["labels"] == [f"w{token}" for token in cloud["tokens"]]
    hf_posenc.convert_checkpoint(stock, "rope", checkpoint / "variant")
    assert run(*asked, "--after", str(checkpoint / "variant"), "--out", out).exit_code == 0
    turned = run(*used, "--model", str(checkpoint / "variant"), "--after", str(checkpoint / "variant"), "--json")
    assert [len(one["wavelengths"]) for one in json.loads(turned.stdout)["found"]] == [4, 4]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nothing", "--scheme", "rope", "--out", "x.png"], "no plot"),
        (["decay", "--out", "x.png"], "--scheme"),
        (["decay", "--scheme", "rope"], "--out"),
        (["decay", "--scheme", "rope", "--out", "x.bmp"], ".png"),
        (["decay", "--scheme", "roppe", "--out", "x.png"], "did you mean"),
        (["attention", "--scheme", "rope", "--out", "x.png"], "--data"),
        (["decay", "--scheme", "rope", "--after", "x", "--out", "x.png"], "--model"),
        (["bias", "--scheme", "alibi", "--scheme", "t5", "--out", "x.png"], "1 at a time"),
        (["decay", "--scheme", "rope", "--length", "1", "--out", "x.png"], "--length"),
        (["encoding", "--model", "nowhere", "--out", "x.png"], "no checkpoint"),
        (["decay", "--scheme", "rope", "--layer", "-1", "--out", "x.png"], "--layer 0 or more"),
        (["decay", "--scheme", "rope", "--rows", "0", "--out", "x.png"], "--rows must be 1"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_what_cannot_be_drawn_is_said(arguments: list[str], said: str) -> None:
    done = run(*arguments)
    assert done.exit_code == 2, done.output
    assert said in done.output
