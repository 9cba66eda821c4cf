"""`make demo`, with few steps, and its page in a browser."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

import hf_posenc  # noqa: F401

ROOT = Path(__file__).parents[2]
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome", "chrome-headless-shell", "microsoft-edge")
DOWNLOADED = ("chromium*/chrome-linux*/chrome", "chromium_headless_shell-*/*/*headless*shell")
"""Where playwright puts the browsers that it downloads, below its directory."""


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Where it wrote, and what it said."""
    directory = tmp_path_factory.mktemp("demo") / "demo"
    command = [sys.executable, "-m", "examples.demo", "--directory", str(directory)]
    done = subprocess.run(
        [*command, "--steps", "6", "--recovery-steps", "2", "--size", "100000", "--test-size", "8192"],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return directory, done.stdout


def test_the_demo_goes_the_whole_way(demo: tuple[Path, str]) -> None:
    directory, said = demo
    assert str((directory / "report.html").resolve()) in said
    assert "learned (stock): perplexity" in said
    assert "it ends there" in said
    for scheme in ("rope", "alibi", "t5"):
        model = AutoModelForCausalLM.from_pretrained(directory / scheme)
        assert model.config.position_scheme in (scheme, {"type": scheme})
        assert (directory / scheme / "model.safetensors").is_file()
        assert re.search(rf"{scheme}: perplexity [\d.]+, at four times the length [+-][\d.]+%", said)
    found = json.loads((directory / "evaluation.json").read_text())["perplexity"]
    assert {(one["model"], one["length"]) for one in found if one["perplexity"]} == {
        ("learned (stock)", 128),
        *((scheme, length) for scheme in ("rope", "alibi", "t5") for length in (128, 256, 512, 1024)),
    }


def test_the_page_holds_everything(demo: tuple[Path, str]) -> None:
    text = (demo[0] / "report.html").read_text()
    assert text.count("<figure") == text.count("<svg") == 5
    assert text.count("<pre>") == 4
    assert not re.search(r"<script|<link|(src|href)=\"https?:", text), "nothing is fetched and nothing is run"
    assert "$" not in re.sub(r"<(pre|svg).*?</\1>", "", text, flags=re.S), "no place of the form is left open"


CHECK = """
<script>
addEventListener('load', () => {
  const page = document.getElementById('page').contentDocument;
  const drawn = [...page.querySelectorAll('figure svg')].map(image => image.getBoundingClientRect());
  document.title = JSON.stringify({
    images: drawn.filter(box => box.width > 100 && box.height > 50).length,
    widest: page.documentElement.scrollWidth,
    smallest: Math.min(...[...page.querySelectorAll('p, li, th, td, pre, figcaption')].map(
      part => parseFloat(page.defaultView.getComputedStyle(part).fontSize))),
    rows: ['lengths', 'recovery'].map(name => page.querySelectorAll(`#${name} tbody tr`).length),
  });
  document.body.append(Object.assign(document.createElement('p'), {id: 'found', textContent: document.title}));
});
</script>
"""


def browser_on_this_machine() -> str | None:
    """Any that is built on Chromium: they all take the same options."""
    found = [os.environ.get("CHROME"), *map(shutil.which, BROWSERS)]
    place = Path(os.environ.get("PLAYWRIGHT_BROWSERS_PATH") or Path.home() / ".cache" / "ms-playwright")
    found += [str(path) for pattern in DOWNLOADED for path in sorted(place.glob(pattern))]
    return next((path for path in found if path), None)


def looked_at(page: str, width: int, directory: Path) -> tuple[dict[str, Any], str]:
    """What a browser makes of a page in a window of this width, and what it complains of."""
    browser = browser_on_this_machine()
    if browser is None:
        pytest.skip(
            "no browser on this machine, so that nobody has looked at the page: `apt-get install chromium`, "
            "`playwright install chromium`, or name one that is built on Chromium in the variable CHROME"
        )
    (directory / "report.html").write_text(page)
    frame = f'<iframe id="page" src="report.html" style="width:{width}px;height:800px;border:0"></iframe>'
    (directory / "look.html").write_text(f"<!doctype html><body>{frame}{CHECK}</body>")
    quiet = ["--disable-gpu", "--disable-background-networking", "--disable-component-update", "--no-first-run"]
    allowed = ["--no-sandbox", "--allow-file-access-from-files", "--enable-logging=stderr"]
    told = [f"--user-data-dir={directory / 'profile'}", "--virtual-time-budget=10000", "--dump-dom"]
    done = subprocess.run(
        [browser, "--headless", *quiet, *allowed, *told, (directory / "look.html").as_uri()],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    found = re.search(r'<p id="found">(.*?)</p>', done.stdout)
    assert found, done.stderr[-2000:]
    return json.loads(found.group(1)), done.stderr


@pytest.mark.parametrize("width", [1200, 390])
def test_the_page_is_readable_in_a_browser(demo: tuple[Path, str], width: int, tmp_path: Path) -> None:
    found, complaints = looked_at((demo[0] / "report.html").read_text(), width, tmp_path)
    assert found["images"] == 5
    assert found["rows"] == [4, 3]
    assert found["smallest"] >= 14
    assert found["widest"] <= width, "nothing sticks out at the side"
    assert "CONSOLE" not in complaints, "no errors of scripts"


def test_the_browser_sees_what_is_wrong(tmp_path: Path) -> None:
    wrong = (
        "<p style='width:500px; font-size:9px'>wide</p><figure><svg width='9'></svg></figure><script>nothing()</script>"
    )
    found, complaints = looked_at(wrong, 390, tmp_path)
    assert (found["images"], found["rows"], found["smallest"]) == (0, [0, 0], 9)
    assert found["widest"] > 390
    assert "CONSOLE" in complaints
