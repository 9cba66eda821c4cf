"""Look at a page in a real browser, at the width of a phone or of a desk. Tests are skipped where there is none."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome", "chrome-headless-shell", "microsoft-edge")
PLAYWRIGHT_BROWSERS = ("chromium*/chrome-linux*/chrome", "chromium_headless_shell-*/*/*headless*shell")
"""Relative to the directory that playwright downloads browsers to."""
PHONE, DESKTOP = 390, 1200
"""Widths of the window in CSS pixels."""
MEASURE_SCRIPT = """
<script>
addEventListener('load', () => {
  const page = document.getElementById('page').contentDocument;
  const measurements = JSON.stringify((%s)(page));
  document.body.append(Object.assign(document.createElement('p'), {id: 'measurements', textContent: measurements}));
});
</script>
"""


def find_browser() -> str | None:
    """Any browser based on Chromium: they share their command-line options."""
    candidates = [os.environ.get("CHROME"), *map(shutil.which, BROWSERS)]
    downloads = Path(os.environ.get("PLAYWRIGHT_BROWSERS_PATH") or Path.home() / ".cache" / "ms-playwright")
    candidates += [str(path) for pattern in PLAYWRIGHT_BROWSERS for path in sorted(downloads.glob(pattern))]
    return next((path for path in candidates if path), None)


def measure_page(page: Path, width: int, measure: str, directory: Path) -> tuple[dict[str, Any], str]:
    """Open a page in a frame and measure it.

    Args:
        page: The HTML file.
        width: Width of the frame in CSS pixels.
        measure: A JavaScript function from the page's document to an object.
        directory: Where to put the frame and the browser's profile.

    Returns:
        What `measure` returned, and the browser's log.
    """
    browser = find_browser()
    if browser is None:
        pytest.skip("no Chromium found: `playwright install chromium`, or set CHROME to a browser based on it")
    frame = f'<iframe id="page" src="{page.as_uri()}" style="width:{width}px;height:800px;border:0"></iframe>'
    script = MEASURE_SCRIPT % measure
    (directory / "frame.html").write_text(f"<!doctype html><body>{frame}{script}</body>", encoding="utf-8")
    quiet = ["--disable-gpu", "--disable-background-networking", "--disable-component-update", "--no-first-run"]
    allowed = ["--no-sandbox", "--allow-file-access-from-files", "--enable-logging=stderr"]
    output = [f"--user-data-dir={directory / 'profile'}", "--virtual-time-budget=10000", "--dump-dom"]
    done = subprocess.run(
        [browser, "--headless", *quiet, *allowed, *output, (directory / "frame.html").as_uri()],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    match = re.search(r'<p id="measurements">(.*?)</p>', done.stdout)
    assert match, done.stderr[-2000:]
    return json.loads(match.group(1)), done.stderr
