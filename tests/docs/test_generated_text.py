"""Generated parts of the documentation are current: measurements, command-line options, the scheme reference."""

from __future__ import annotations

from pathlib import Path

import pytest
import transformers
from packaging.version import Version

from hf_posenc import list_schemes
from hf_posenc.cli import app
from scripts.fill_pages import MARKED, PAGES, ROOT, fill_page, generate
from scripts.make_census import page_version
from scripts.make_census import render_page as render_census
from scripts.make_scheme_reference import render_page

MARKED_PAGES = [page for page in PAGES if MARKED.search(page.read_text(encoding="utf-8"))]


def test_pages_with_measurements_are_marked() -> None:
    expected = {"README.md", "analysis.md", "choosing.md", "cli.md", "evaluation.md"}
    assert expected <= {page.name for page in MARKED_PAGES}


@pytest.mark.parametrize("page", MARKED_PAGES, ids=lambda page: page.stem)
def test_generated_text_is_current(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert text == fill_page(text), "run `make reference`"


@pytest.mark.parametrize("page", MARKED_PAGES, ids=lambda page: page.stem)
def test_every_marker_is_closed(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert text.count("<!-- generated: ") == text.count("<!-- end generated -->") == len(MARKED.findall(text))


def test_the_scheme_reference_is_current() -> None:
    committed = (ROOT / "docs" / "schemes.md").read_text(encoding="utf-8")
    assert committed == render_page(list_schemes().values()), "run `make reference`"


def test_the_census_of_model_families_is_current() -> None:
    committed = (ROOT / "docs" / "families.md").read_text(encoding="utf-8")
    if Version(transformers.__version__) < Version(page_version(committed)):  # a newer one needs a new page
        pytest.skip(f"docs/families.md describes transformers {page_version(committed)}")
    assert committed == render_census(), "run `make census`"


def test_every_command_is_documented() -> None:
    commands = {command.name or command.callback.__name__ for command in app.registered_commands if command.callback}
    page = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    assert {match["name"].partition(" ")[2] for match in MARKED.finditer(page)} == commands


def test_a_stale_measurement_is_detected() -> None:
    page = "<!-- generated: recovery -->\n0.001\n<!-- end generated -->\n"
    assert fill_page(page) != page
    assert generate("recovery") in fill_page(page)


def test_an_unknown_generator_is_an_error() -> None:
    with pytest.raises(KeyError):
        fill_page("<!-- generated: wishes -->\n<!-- end generated -->\n")
