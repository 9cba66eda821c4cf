"""Measurements quoted in the documentation are those of the results files."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.make_measurements import MARKED, PAGES, fill_page, generate

MARKED_PAGES = [page for page in PAGES if MARKED.search(page.read_text(encoding="utf-8"))]


def test_pages_quote_measurements() -> None:
    assert {"README.md", "choosing.md", "analysis.md", "evaluation.md"} <= {page.name for page in MARKED_PAGES}


@pytest.mark.parametrize("page", MARKED_PAGES, ids=lambda page: page.stem)
def test_quoted_measurements_are_current(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert text == fill_page(text), "run `make reference`"


@pytest.mark.parametrize("page", MARKED_PAGES, ids=lambda page: page.stem)
def test_every_marker_is_closed(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert text.count("<!-- generated: ") == text.count("<!-- end generated -->") == len(MARKED.findall(text))


def test_a_stale_measurement_is_detected() -> None:
    page = "<!-- generated: recovery -->\n0.001\n<!-- end generated -->\n"
    assert fill_page(page) != page
    assert generate("recovery") in fill_page(page)


def test_an_unknown_generator_is_an_error() -> None:
    with pytest.raises(KeyError):
        fill_page("<!-- generated: wishes -->\n<!-- end generated -->\n")
