"""`hf-posenc inspect`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from .app import Json, app, said_plainly


@app.command()
def inspect(
    directory: Annotated[Path, typer.Argument(help="Of a variant, a stock checkpoint, a training run or one of its.")],
    as_json: Json = False,
) -> None:
    """Say what a directory holds and whether it is whole, without loading any weights.

    The position scheme, what acts in each layer and which way it is computed, parameters, files, and of a training
    run how far it came. Exits with 2 if anything is damaged or missing, and says what.

    Example: hf-posenc inspect gpt2-rope

    Example: hf-posenc inspect out/checkpoint-500 --json
    """
    with said_plainly():
        from ..checkpoints.inspection import inspect as look

        found = look(directory)
        typer.echo(json.dumps(found.as_json(), indent=1, default=str) if as_json else str(found))
        if found.problems:
            raise ValueError("; ".join(found.problems))
