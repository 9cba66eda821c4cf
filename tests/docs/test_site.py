"""The documentation site: the API reference is complete, and links work on the site as they do on GitHub."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import hf_posenc

ROOT = Path(__file__).parent.parent.parent
REPO = "https://github.com/someone/project"


def test_every_public_name_is_in_the_api_reference() -> None:
    page = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    documented = re.findall(r"^::: hf_posenc\.(\w+)$", page, re.MULTILINE)
    assert set(hf_posenc.__all__) <= set(documented)


@pytest.mark.parametrize(
    "page", [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))], ids=lambda page: page.stem
)
def test_named_source_files_exist(page: Path) -> None:
    paths = re.findall(r"`((?:hf_posenc|patches|tests|scripts)/[\w/.]+)`", page.read_text(encoding="utf-8"))
    assert [path for path in paths if not (ROOT / path).exists()] == []


@pytest.mark.parametrize(
    ("directory", "link", "expected"),
    [
        ("docs", "[x](training.md#recipe)", "[x](training.md#recipe)"),
        ("docs", "[x](../CONTRIBUTING.md)", "[x](contributing.md)"),
        ("docs", "[x](../examples/quickstart.py)", f"[x]({REPO}/blob/main/examples/quickstart.py)"),
        ("", "[x](docs/schemes.md#rope)", "[x](schemes.md#rope)"),
        ("", "[x](examples)", f"[x]({REPO}/tree/main/examples)"),
        ("", "[x](https://arxiv.org) [y](#here)", "[x](https://arxiv.org) [y](#here)"),
    ],
)
def test_links_are_rewritten(directory: str, link: str, expected: str) -> None:
    pytest.importorskip("mkdocs", reason="needs hf_posenc[docs]")
    from scripts.mkdocs_hooks import rewrite_links

    assert rewrite_links(link, directory, REPO) == expected


def test_a_broken_link_fails_the_build() -> None:
    exceptions = pytest.importorskip("mkdocs.exceptions", reason="needs hf_posenc[docs]")
    from scripts.mkdocs_hooks import rewrite_links

    with pytest.raises(exceptions.PluginError, match=r"benchmarks/MISSING\.md"):
        rewrite_links("[x](../benchmarks/MISSING.md)", "docs", REPO)
