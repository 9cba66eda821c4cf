"""What the documents say is so: the demo, the worked example, the reference page. test_code_blocks.py has the rest."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import hf_posenc
from hf_posenc.schemes import Kind
from scripts import make_scheme_reference

ROOT = Path(__file__).parents[2]


def test_demo_runs(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "examples" / "quickstart.py"), "--directory", str(tmp_path / "demo")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("to the bit") == 3
    assert "as before" in done.stdout
    assert (tmp_path / "demo" / "alibi" / "model.safetensors").exists()


def test_the_reference_page_is_current() -> None:
    page = make_scheme_reference.page(hf_posenc.list_schemes().values())
    assert (ROOT / "docs" / "schemes.md").read_text() == page, "run `make reference`"
    for name, info in hf_posenc.list_schemes().items():
        assert info.kind is not Kind.OTHER
        assert info.formula
        assert info.cost
        assert info.neutral
        assert f"### {name}\n" in page
        assert info.formula in page
        assert info.cost in page
        assert info.neutral in page
        assert all(f"| `{option}` |" in page for option in info.options)
    assert all(f"## {kind.value}" in page for kind in Kind if kind is not Kind.OTHER)


def test_the_readme_names_every_scheme() -> None:
    readme = (ROOT / "README.md").read_text()
    assert [name for name in hf_posenc.list_schemes() if f"| `{name}` |" not in readme] == []


def test_the_worked_example_of_a_new_scheme(tmp_path: Path) -> None:
    """One file and one row, in a copy of the project: the house rules, a part of the matrix, its own parity test."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    scheme, parity = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    row = re.search(r"^    Case\(.*\n", text, re.MULTILINE)[0]  # type: ignore[index]
    for part in ("hf_posenc", "patches", "tests"):
        shutil.copytree(ROOT / part, tmp_path / part, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    (tmp_path / "hf_posenc" / "schemes" / "gaussian.py").write_text(scheme)
    cases = tmp_path / "tests" / "cases.py"
    cases.write_text(cases.read_text().replace("CASES = [\n", f"CASES = [\n{row}", 1))
    formulas = tmp_path / "tests" / "test_formulas.py"
    formulas.write_text(f"{formulas.read_text()}\n\n{parity}")
    chosen = "gpt2-gaussian or house or test_gaussian"
    files = [f"tests/test_{name}.py" for name in ("house", "matrix", "loading", "formulas")]
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-k", chosen, *files]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=300)
    assert done.returncode == 0, done.stdout
    passed = int(re.search(r"(\d+) passed", done.stdout)[1])  # type: ignore[index]
    assert passed > 60, done.stdout
