"""Run the notebooks in examples/ and save their outputs in them: `python -m scripts.run_notebooks [NOTEBOOK ...]`.

Cells run in this Python, in a temporary directory, without Jupyter. A cell's output is what it prints, and the value of
its last line: a matplotlib figure as an image, anything else as text. Assignments in the cell with the tag `parameters`
can be replaced, as papermill does it.
"""

from __future__ import annotations

import argparse
import ast
import base64
import contextlib
import copy
import io
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))
Notebook = dict[str, Any]
DPI = 100


def read_notebook(path: Path) -> Notebook:
    return json.loads(path.read_text(encoding="utf-8"))


def code_cells(notebook: Notebook) -> list[dict[str, Any]]:
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def run_notebook(notebook: Notebook, directory: Path, parameters: dict[str, Any] | None = None) -> Notebook:
    """Run all code cells.

    Args:
        notebook: The notebook, as read from JSON.
        directory: The working directory of the cells.
        parameters: New values for names that the cell with the tag `parameters` assigns.

    Returns:
        A copy of the notebook with the outputs of this run.

    Raises:
        KeyError: If that cell does not assign one of the names.
        Exception: Whatever a cell raises.
    """
    notebook = copy.deepcopy(notebook)
    variables: dict[str, Any] = {"__name__": "__main__"}
    with _chdir(directory):
        for number, cell in enumerate(code_cells(notebook), 1):
            source = "".join(cell["source"])
            if "parameters" in cell["metadata"].get("tags", []):
                source = replace_parameters(source, parameters or {})
            cell["outputs"] = run_cell(source, variables, f"cell {number}")
            cell["execution_count"] = number
            for output in cell["outputs"]:
                if output["output_type"] == "execute_result":
                    output["execution_count"] = number
    return notebook


def replace_parameters(source: str, parameters: dict[str, Any]) -> str:
    """Append assignments of the new values, after checking that the cell assigns these names."""
    assigned = {
        name.id
        for statement in ast.parse(source).body
        if isinstance(statement, ast.Assign)
        for target in statement.targets
        for name in ast.walk(target)
        if isinstance(name, ast.Name)
    }
    for name in parameters:
        if name not in assigned:
            raise KeyError(f"{name} is not a parameter of the notebook; it has {', '.join(sorted(assigned))}")
    return "\n".join([source, *(f"{name} = {value!r}" for name, value in parameters.items())])


def run_cell(source: str, variables: dict[str, Any], name: str) -> list[dict[str, Any]]:
    """Run one cell and return its outputs. Lines that start with % are for Jupyter alone."""
    code = "\n".join("" if line.startswith("%") else line for line in source.splitlines())
    tree, value = ast.parse(code), None
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(tree, name, "exec"), variables)
        if last is not None:
            value = eval(compile(ast.Expression(last.value), name, "eval"), variables)
    outputs: list[dict[str, Any]] = []
    if printed.getvalue():
        outputs.append({"name": "stdout", "output_type": "stream", "text": _lines(printed.getvalue())})
    if value is not None:
        outputs.append({"data": _show(value), "metadata": {}, "output_type": "execute_result"})
    return outputs


def _show(value: Any) -> dict[str, Any]:
    if hasattr(value, "savefig"):
        buffer = io.BytesIO()
        value.savefig(buffer, dpi=DPI)
        return {"image/png": base64.b64encode(buffer.getvalue()).decode(), "text/plain": ["<Figure>"]}
    return {"text/plain": _lines(repr(value))}


def _lines(text: str) -> list[str]:
    return text.splitlines(keepends=True)


@contextlib.contextmanager
def _chdir(directory: Path) -> Iterator[None]:
    """As `contextlib.chdir`, which Python 3.10 does not have."""
    before = Path.cwd()
    os.chdir(directory)
    try:
        yield
    finally:
        os.chdir(before)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("notebooks", type=Path, nargs="*", default=NOTEBOOKS)
    for path in parser.parse_args().notebooks:
        print(f"running {path.name}", flush=True)
        with tempfile.TemporaryDirectory() as directory:
            notebook = run_notebook(read_notebook(path), Path(directory))
        path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
