"""The gallery shows every scheme, with pictures drawn from the code that are legible on a phone."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from PIL import Image
from transformers import GPT2Config

from hf_posenc import analysis, list_schemes
from hf_posenc.schemes import Kind
from scripts.gallery import pictures
from scripts.gallery.models import count_parameters, spec_from_scratch
from scripts.gallery.page import FIGURES, PAGE, read_numbers, render_page, scheme_argument
from scripts.make_gallery import MAX_BYTES
from tests.support import browser

ROOT = Path(__file__).parents[2]
SCHEMES = list_schemes()
REDRAW = "run `python -m scripts.make_gallery --schemes {}` to draw it"
SHOWN_WIDTH = 280
"""Of a picture on a phone, in CSS pixels, at least: see `test_the_gallery_is_readable_in_a_browser`."""


def test_the_gallery_is_current() -> None:
    numbers = read_numbers()
    for name in SCHEMES:
        assert name in numbers["schemes"], REDRAW.format(name)
    assert PAGE.read_text(encoding="utf-8") == render_page(SCHEMES.values(), numbers), "run `make reference`"


@pytest.mark.parametrize("name", SCHEMES)
def test_every_scheme_has_a_small_picture(name: str) -> None:
    path = FIGURES / f"{name}.png"
    assert path.is_file(), REDRAW.format(name)
    assert path.stat().st_size <= MAX_BYTES
    assert Image.open(path).width >= 2 * SHOWN_WIDTH, "sharp on a phone's screen"


def test_there_is_no_picture_of_a_scheme_that_is_gone() -> None:
    assert {path.stem for path in FIGURES.glob("*.png")} == set(SCHEMES)


@pytest.mark.parametrize("name", SCHEMES)
def test_the_line_to_type_is_valid(name: str) -> None:
    argument = json.loads(scheme_argument(SCHEMES[name]))
    assert GPT2Config(position_scheme=argument).position_scheme == argument
    assert f"`position_scheme={scheme_argument(SCHEMES[name])}`" in PAGE.read_text(encoding="utf-8")


def test_fonts_are_legible_at_the_width_of_a_phone() -> None:
    assert pictures.SMALLEST_FONT / 72 / pictures.WIDTH * SHOWN_WIDTH > 8.5


@pytest.mark.parametrize("name", ["sinusoidal", "rope", "alibi", "shaw", "cope", "temperature", "none"])
def test_every_kind_has_a_picture_of_its_own(name: str) -> None:
    info = SCHEMES[name]
    model = analysis.build_model(spec_from_scratch(info), max_positions=64)
    text = torch.arange(4096) * 7 % 1000
    picture = pictures.draw(info, model, text)
    assert picture.caption.endswith(".")
    assert picture.figure.get_size_inches().tolist() == [pictures.WIDTH, pictures.HEIGHT]
    axes = picture.figure.axes[0]
    assert axes.get_images() or len(axes.get_lines()) > 0
    assert axes.get_xlabel()
    assert axes.get_ylabel()
    sizes = [text.get_size() for text in (axes.xaxis.label, axes.yaxis.label, *axes.get_xticklabels())]
    assert min(sizes) >= pictures.SMALLEST_FONT


def test_a_scheme_that_its_kind_has_no_picture_for_shows_attention() -> None:
    """`none` adds nothing to the scores, so the picture of scores cannot be drawn."""
    unusual = SCHEMES["none"].__class__(**{**vars(SCHEMES["none"]), "kind": Kind.CONTENT})
    picture = pictures.draw(unusual, analysis.build_model("none"), torch.arange(4096) % 1000)
    weights = picture.figure.axes[0].get_images()[0].get_array()
    assert weights[3, :4].tolist() == pytest.approx([0.25] * 4)
    assert "Attention" in picture.caption


def test_scores_by_distance_are_those_of_the_scheme() -> None:
    scores = pictures.mean_scores_by_distance(analysis.build_model("alibi", num_heads=8), torch.arange(64) * 7, 32)
    slopes = 2.0 ** -torch.arange(1.0, 9.0)
    distances = torch.arange(32.0)
    torch.testing.assert_close(scores, -slopes[:, None] * distances, rtol=0, atol=1e-5)
    assert not torch.allclose(scores, -slopes[:, None] * (distances + 1))


def test_parameters_are_counted_without_the_replaced_table() -> None:
    counts = {name: count_parameters(SCHEMES[name]) for name in ("learned", "t5")}
    assert counts == {"learned": 0, "t5": 12 * 32}
    assert {name: read_numbers()["schemes"][name]["parameters"] for name in counts} == counts


MEASURE = """page => {
  const cards = [...page.querySelectorAll('.grid.cards > ul > li')];
  const images = [...page.querySelectorAll('article img')];
  const sizes = [...page.querySelectorAll('article p, article li, article code')].map(
    element => parseFloat(page.defaultView.getComputedStyle(element).fontSize));
  return {
    cards: cards.length,
    columns: new Set(cards.map(card => Math.round(card.getBoundingClientRect().left))).size,
    loaded: images.filter(image => image.complete && image.naturalWidth > 0).length,
    narrowest: Math.min(...images.map(image => image.getBoundingClientRect().width)),
    widest: page.documentElement.scrollWidth,
    smallest: Math.min(...sizes),
  };
}"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The gallery as a page of the site, with its theme and extensions."""
    pytest.importorskip("mkdocs", reason="needs hf_posenc[docs]")
    pytest.importorskip("material", reason="needs hf_posenc[docs]")
    if browser.find_browser() is None:
        pytest.skip("no Chromium found: `playwright install chromium`, or set CHROME to a browser based on it")
    from mkdocs.commands.build import build
    from mkdocs.config import load_config

    directory = tmp_path_factory.mktemp("site")
    for name in ("gallery", "schemes"):
        (directory / "docs").mkdir(exist_ok=True)
        shutil.copy(ROOT / "docs" / f"{name}.md", directory / "docs")
    (directory / "docs" / "choosing.md").write_text("# Choosing\n")
    shutil.copytree(FIGURES, directory / "docs" / "figures" / "gallery")
    settings: dict[str, Any] = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    del settings["nav"], settings["validation"]
    settings |= {"plugins": [], "hooks": [], "strict": False, "use_directory_urls": False}
    (directory / "mkdocs.yml").write_text(yaml.safe_dump(settings))
    build(load_config(str(directory / "mkdocs.yml")))
    return directory / "site" / "gallery.html"


@pytest.mark.slow
@pytest.mark.parametrize(("width", "columns"), [(browser.PHONE, 1), (browser.DESKTOP, 2)])
def test_the_gallery_is_readable_in_a_browser(site: Path, width: int, columns: int, tmp_path: Path) -> None:
    measured, _ = browser.measure_page(site, width, MEASURE, tmp_path)
    assert measured["cards"] == measured["loaded"] == len(SCHEMES)
    assert measured["columns"] >= columns
    assert measured["narrowest"] >= SHOWN_WIDTH
    assert measured["widest"] <= width, "no horizontal scrolling"
    assert measured["smallest"] >= 11


@pytest.mark.slow
def test_the_browser_check_detects_a_missing_picture_and_a_wide_page(site: Path, tmp_path: Path) -> None:
    text = site.read_text(encoding="utf-8").replace("gallery/alibi.png", "gallery/missing.png")
    broken = site.with_name("broken.html")
    broken.write_text(text.replace("<article", '<article style="width:900px;font-size:5px"'), encoding="utf-8")
    measured, _ = browser.measure_page(broken, browser.PHONE, MEASURE, tmp_path)
    assert measured["loaded"] == len(SCHEMES) - 1
    assert measured["widest"] > browser.PHONE
