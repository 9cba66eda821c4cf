"""The worked examples of CONTRIBUTING.md: a new scheme and a new architecture."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.code_blocks import Kind, parse_blocks

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "CONTRIBUTING.md"


def run_page(page: Path, directory: Path) -> subprocess.CompletedProcess[str]:
    """Run all blocks in their own process: the examples register a scheme and an architecture."""
    command = [sys.executable, "-m", "tests.support.page_runner", str(page)]
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1"}
    return subprocess.run(command, capture_output=True, text=True, cwd=directory, env=environment, timeout=300)


def test_examples_run_and_print_what_the_page_says(tmp_path: Path) -> None:
    done = run_page(PAGE, tmp_path)
    assert done.returncode == 0, done.stderr[-4000:]


@pytest.mark.slow
def test_a_wrong_scheme_is_detected(tmp_path: Path) -> None:
    """Control: with a bias of the wrong sign, the parity check of the example fails."""
    page = PAGE.read_text(encoding="utf-8")
    wrong = page.replace("bias = -self.options.slope *", "bias = self.options.slope *")
    assert wrong != page
    (tmp_path / "wrong.md").write_text(wrong, encoding="utf-8")
    done = run_page(tmp_path / "wrong.md", tmp_path)
    assert done.returncode != 0
    assert "not close" in done.stderr


def test_named_files_and_targets_exist() -> None:
    page = PAGE.read_text(encoding="utf-8")
    paths = re.findall(r"`((?:hf_posenc|patches|tests|docs|scripts)/[\w/.]+)`", page)
    assert paths
    missing = [path for path in paths if not (ROOT / path).exists() and path != "hf_posenc/schemes/linear.py"]
    assert not missing
    targets = re.findall(r"^([\w-]+):.*##", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    assert set(re.findall(r"`make ([\w-]+)`", page)) <= set(targets)


def test_the_page_has_both_examples() -> None:
    code = "\n".join(
        block.text for block in parse_blocks(PAGE.read_text(encoding="utf-8")) if block.kind is Kind.PYTHON
    )
    assert "(Scheme[" in code
    assert "Architecture(" in code
