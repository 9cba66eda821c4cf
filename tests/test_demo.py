"""`make demo`, with few steps, and its page in a browser."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

import hf_posenc  # noqa: F401

ROOT = Path(__file__).parent.parent
BROWSERS = ("chromium", "chromium-browser", "google-chrome")


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Where it wrote, and what it said."""
    directory = tmp_path_factory.mktemp("demo") / "demo"
    command = [sys.executable, "-m", "examples.demo", "--directory", str(directory)]
    done = subprocess.run(
        [*command, "--steps", "6", "--recovery-steps", "2", "--size", "100000", "--test-size", "16384"],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=400,
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
    size: parseFloat(page.defaultView.getComputedStyle(page.body).fontSize),
    rows: ['lengths', 'recovery'].map(name => page.querySelectorAll(`#${name} tbody tr`).length),
    scrolled: [...page.querySelectorAll('.card')].filter(card => card.scrollWidth > card.clientWidth).length,
  });
  document.body.append(Object.assign(document.createElement('p'), {id: 'found', textContent: document.title}));
});
</script>
"""


@pytest.mark.parametrize("width", [1200, 390])
def test_the_page_is_readable_in_a_browser(demo: tuple[Path, str], width: int, tmp_path: Path) -> None:
    browser = next((path for path in map(shutil.which, BROWSERS) if path), None)
    if browser is None:
        pytest.skip(f"no browser on this machine: install one of {', '.join(BROWSERS)} to have the page looked at")
    page = tmp_path / "report.html"
    page.write_text((demo[0] / "report.html").read_text())
    frame = f'<iframe id="page" src="report.html" style="width:{width}px;height:800px;border:0"></iframe>'
    (tmp_path / "look.html").write_text(f"<!doctype html><body>{frame}{CHECK}</body>")
    quiet = ["--disable-gpu", "--disable-background-networking", "--disable-component-update", "--no-first-run"]
    done = subprocess.run(
        [
            *(
                browser,
                "--headless",
                "--no-sandbox",
                *quiet,
                "--allow-file-access-from-files",
                "--enable-logging=stderr",
            ),
            *(f"--user-data-dir={tmp_path / 'profile'}", "--virtual-time-budget=10000", "--dump-dom"),
            (tmp_path / "look.html").as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    told = re.search(r'<p id="found">(.*?)</p>', done.stdout)
    assert told, done.stderr[-2000:]
    found = json.loads(told.group(1))
    assert found["images"] == 5
    assert found["rows"] == [4, 3]
    assert found["size"] >= 14
    assert found["widest"] <= width, "nothing sticks out at the side"
    assert "CONSOLE" not in done.stderr, "no errors of scripts"
