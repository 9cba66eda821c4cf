"""The notebooks in examples/ are executed, say how to use a real checkpoint, and run at a small size."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest

from scripts.run_notebooks import NOTEBOOKS, code_cells, read_notebook, replace_parameters, run_cell, run_notebook

SMALL: dict[str, dict[str, Any]] = {
    "gpt2_beyond_1024": {"PRETRAINING_STEPS": 2, "TRAINING_STEPS": 2, "ROWS": 1, "TEST_TOKENS": 4096},
    "embedder_beyond_512": {"TRAINING_STEPS": 2, "NUM_SENTENCES": 4, "DEPTHS": (0.1, 0.9), "ROWS": 2},
}
PRINTED = {
    "gpt2_beyond_1024": ["IndexError", "stops at 1,024", "1,540 tokens"],
    "embedder_beyond_512": ["reads 512 tokens", "reads 2048 tokens; embeddings identical: True"],
}
"""What must be in the outputs of any run, whatever was learned."""
EXTRAS = {"embedder_beyond_512": "sentence_transformers"}


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
@pytest.mark.filterwarnings("ignore")
def test_a_notebook_runs_at_a_small_size(path: Path, tmp_path: Path) -> None:
    extra = EXTRAS.get(path.stem)
    if extra is not None and importlib.util.find_spec(extra) is None:
        pytest.skip(f"{extra} is not installed: it is in the extra embeddings")
    notebook = run_notebook(read_notebook(path), tmp_path, SMALL[path.stem])
    for expected in PRINTED[path.stem]:
        assert expected in printed(notebook)
    json.dumps(notebook)


def test_a_failing_cell_fails_the_run(tmp_path: Path) -> None:
    cell = {"cell_type": "code", "metadata": {}, "source": ["x = 1\n", "assert x == 2"], "outputs": []}
    with pytest.raises(AssertionError):
        run_notebook({"cells": [cell]}, tmp_path)


def test_cells_share_variables_and_show_their_last_value() -> None:
    variables: dict[str, Any] = {}
    assert run_cell("%matplotlib inline\nx = 3\nprint(x)", variables, "1")[0]["text"] == ["3\n"]
    (output,) = run_cell("x + 1", variables, "2")
    assert output["data"] == {"text/plain": ["4"]}
    assert run_cell("x = 4", variables, "3") == []


def test_only_parameters_can_be_replaced() -> None:
    source = "STEPS = 100  # many\nFIRST, LAST = 1, 2"
    variables: dict[str, Any] = {}
    run_cell(replace_parameters(source, {"STEPS": 2, "LAST": 5}), variables, "parameters")
    assert (variables["STEPS"], variables["FIRST"], variables["LAST"]) == (2, 1, 5)
    with pytest.raises(KeyError, match="ROWS is not a parameter"):
        replace_parameters(source, {"ROWS": 1})
