"""The README's snippet prints what the README says, and the demo runs, each in a process of its own."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_readme_snippet_prints_what_it_says(tmp_path: Path) -> None:
    blocks = re.findall(r"```(\w*)\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    first = next(index for index, (language, _) in enumerate(blocks) if language == "python")
    code, expected = blocks[first][1], blocks[first + 1][1]
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout == expected


def test_demo_runs(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "examples" / "quickstart.py"), "--directory", str(tmp_path / "demo")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("to the bit") == 3
    assert "as before" in done.stdout
    assert (tmp_path / "demo" / "alibi" / "model.safetensors").exists()
