"""Run the notebooks in examples/ and save their outputs in them: `python -m scripts.run_notebooks [NOTEBOOK ...]`.

Each notebook runs in a Jupyter kernel of its own, in a temporary directory. Values in its cell with the tag
`parameters` can be replaced, as papermill does it.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient
from nbformat import NotebookNode

ROOT = Path(__file__).parent.parent
NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))
CELL_TIMEOUT = 3600


def read_notebook(path: Path) -> NotebookNode:
    return nbformat.read(path, as_version=4)


def code_cells(notebook: NotebookNode) -> list[NotebookNode]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def run_notebook(notebook: NotebookNode, directory: Path, parameters: dict[str, Any] | None = None) -> None:
    """Run all cells, and keep their results and what they print in the notebook.

    Args:
        notebook: The notebook.
        directory: The working directory of the kernel.
        parameters: Values that are assigned in a cell after the one with the tag `parameters`, for this run only.

    Raises:
        nbclient.exceptions.CellExecutionError: If a cell raises.
    """
    cells = list(notebook.cells)
    if parameters:
        (index,) = (number for number, cell in enumerate(cells) if "parameters" in cell.metadata.get("tags", []))
        source = "\n".join(f"{name} = {value!r}" for name, value in parameters.items())
        notebook.cells.insert(index + 1, nbformat.v4.new_code_cell(source))
    resources = {"metadata": {"path": str(directory)}}
    client = NotebookClient(
        notebook, timeout=CELL_TIMEOUT, resources=resources, record_timing=False, coalesce_streams=True
    )
    client.execute(env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])})
    notebook.cells = cells
    for number, cell in enumerate(code_cells(notebook), 1):
        # Progress bars and warnings would fill the page.
        cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
        cell.execution_count = number
        for output in cell.outputs:
            if output.output_type == "execute_result":
                output.execution_count = number


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("notebooks", type=Path, nargs="*", default=NOTEBOOKS)
    for path in parser.parse_args().notebooks:
        print(f"running {path.name}", flush=True)
        notebook = read_notebook(path)
        with tempfile.TemporaryDirectory() as directory:
            run_notebook(notebook, Path(directory))
        nbformat.write(notebook, path)


if __name__ == "__main__":
    main()
