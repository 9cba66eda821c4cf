"""The notebooks in examples/ are executed, say how to use a real checkpoint, and run at a small size."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))

SMALL: dict[str, dict[str, Any]] = {
    "gpt2_beyond_1024": {"PRETRAINING_STEPS": 2, "TRAINING_STEPS": 2, "ROWS": 1, "TEST_TOKENS": 4096},
    "embedder_beyond_512": {"TRAINING_STEPS": 2, "NUM_SENTENCES": 4, "DEPTHS": (0.1, 0.9), "ROWS": 2},
}
PRINTED = {
    "gpt2_beyond_1024": ["IndexError", "stops at 1,024", "1,540 tokens"],
    "embedder_beyond_512": ["reads 512 tokens", "reads 2048 tokens; embeddings identical: True"],
}
"""What must be in the outputs of any run, whatever was learned."""
NEEDED = {"gpt2_beyond_1024": ["nbclient", "ipykernel"]}
NEEDED["embedder_beyond_512"] = [*NEEDED["gpt2_beyond_1024"], "sentence_transformers"]


def read_notebook(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


def code_cells(notebook: dict[str, Any]) -> list[dict[str, Any]]:
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def printed(notebook: dict[str, Any]) -> str:
    outputs = [output for cell in code_cells(notebook) for output in cell["outputs"]]
    return "".join("".join(output.get("text") or output["data"]["text/plain"]) for output in outputs)


def test_there_are_two_notebooks() -> None:
    assert {path.stem for path in NOTEBOOKS} == set(SMALL) == set(PRINTED)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_executed_and_needs_no_download(path: Path) -> None:
    notebook = read_notebook(path)
    assert (notebook["nbformat"], len({cell["id"] for cell in notebook["cells"]})) == (4, len(notebook["cells"]))
    assert [cell["execution_count"] for cell in code_cells(notebook)] == list(range(1, len(code_cells(notebook)) + 1))
    for expected in PRINTED[path.stem]:
        assert expected in printed(notebook)
    images = [output for cell in code_cells(notebook) for output in cell["outputs"] if "image/png" in str(output)]
    assert images
    parameters = [cell for cell in code_cells(notebook) if "parameters" in cell["metadata"].get("tags", [])]
    assert len(parameters) == 1
    assert re.search(r"^MODEL = None  # .*Hub id", "".join(parameters[0]["source"]), re.MULTILINE)
    assert not re.search(r"/(tmp|work|home|root)/", path.read_text(encoding="utf-8")), "paths of the machine it ran on"
    assert path.stat().st_size < 120_000


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_at_a_small_size(path: Path, tmp_path: Path) -> None:
    missing = [package for package in NEEDED[path.stem] if importlib.util.find_spec(package) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} not installed: they are in the extras notebooks and embeddings")
    from scripts import run_notebooks

    notebook = run_notebooks.read_notebook(path)
    cells = len(notebook.cells)
    run_notebooks.run_notebook(notebook, tmp_path, SMALL[path.stem])
    assert len(notebook.cells) == cells
    for expected in PRINTED[path.stem]:
        assert expected in printed(notebook)


@pytest.mark.slow
def test_a_failing_cell_fails_the_run(tmp_path: Path) -> None:
    nbformat = pytest.importorskip("nbformat")
    exceptions = pytest.importorskip("nbclient.exceptions")
    pytest.importorskip("ipykernel")
    from scripts import run_notebooks

    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("x = 1\nassert x == 2")])
    with pytest.raises(exceptions.CellExecutionError, match="assert x == 2"):
        run_notebooks.run_notebook(notebook, tmp_path)
