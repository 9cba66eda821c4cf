"""`make demo` with few steps, and its report in a browser. Slow: it starts three training runs."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

import hf_posenc  # noqa: F401
from tests.support import browser

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The output directory, and what the demo printed."""
    directory = tmp_path_factory.mktemp("demo") / "demo"
    command = [sys.executable, "-m", "examples.demo", "--directory", str(directory)]
    done = subprocess.run(
        [*command, "--steps", "6", "--finetuning-steps", "2", "--train-size", "100000", "--test-size", "8192"],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return directory, done.stdout


def test_the_demo_runs_to_the_end(demo: tuple[Path, str]) -> None:
    directory, printed = demo
    assert str((directory / "report.html").resolve()) in printed
    assert re.search(r"learned \(stock\): perplexity [\d.]+ at 128 tokens", printed)
    for scheme in ("rope", "alibi", "t5"):
        model = AutoModelForCausalLM.from_pretrained(directory / scheme)
        assert model.config.position_scheme in (scheme, {"type": scheme})
        assert (directory / scheme / "model.safetensors").is_file()
        assert re.search(rf"{scheme}: perplexity [\d.]+, [+-][\d.]+% at four times the length", printed)
    results = json.loads((directory / "evaluation.json").read_text())["perplexity"]
    assert {(result["model"], result["length"]) for result in results if result["perplexity"]} == {
        ("learned (stock)", 128),
        *((scheme, length) for scheme in ("rope", "alibi", "t5") for length in (128, 256, 512, 1024)),
    }


def test_the_report_is_complete_and_self_contained(demo: tuple[Path, str]) -> None:
    html = (demo[0] / "report.html").read_text()
    assert html.count("<figure") == html.count("<svg") == 5
    assert html.count("<pre>") == 4
    assert not re.search(r"<script|<link|(src|href)=\"https?:", html)
    assert "$" not in re.sub(r"<(pre|svg).*?</\1>", "", html, flags=re.S), "all placeholders are filled"


MEASURE = """page => {
  const drawn = [...page.querySelectorAll('figure svg')].map(image => image.getBoundingClientRect());
  return {
    images: drawn.filter(box => box.width > 100 && box.height > 50).length,
    widest: page.documentElement.scrollWidth,
    smallest: Math.min(...[...page.querySelectorAll('p, li, th, td, pre, figcaption')].map(
      element => parseFloat(page.defaultView.getComputedStyle(element).fontSize))),
    rows: ['lengths', 'recovery'].map(name => page.querySelectorAll(`#${name} tbody tr`).length),
  };
}"""


def render_in_browser(page: str, width: int, directory: Path) -> tuple[dict[str, Any], str]:
    """Measurements of a page in a window of this width, and the browser's log."""
    (directory / "report.html").write_text(page)
    return browser.measure_page(directory / "report.html", width, MEASURE, directory)


@pytest.mark.parametrize("width", [browser.DESKTOP, browser.PHONE])
def test_the_report_is_readable_in_a_browser(demo: tuple[Path, str], width: int, tmp_path: Path) -> None:
    measurements, log = render_in_browser((demo[0] / "report.html").read_text(), width, tmp_path)
    assert measurements["images"] == 5
    assert measurements["rows"] == [4, 3]
    assert measurements["smallest"] >= 14
    assert measurements["widest"] <= width, "no horizontal scrolling"
    assert "CONSOLE" not in log, "no script errors"


def test_the_browser_check_detects_problems(tmp_path: Path) -> None:
    wrong = (
        "<p style='width:500px; font-size:9px'>wide</p><figure><svg width='9'></svg></figure><script>nothing()</script>"
    )
    measurements, log = render_in_browser(wrong, 390, tmp_path)
    assert (measurements["images"], measurements["rows"], measurements["smallest"]) == (0, [0, 0], 9)
    assert measurements["widest"] > 390
    assert "CONSOLE" in log
