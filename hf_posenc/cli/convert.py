"""`hf-posenc convert`."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Annotated

import typer

from .app import Json, app, said_plainly, scheme_of


@app.command()
def convert(
    source: Annotated[str, typer.Argument(help="A checkpoint's directory, or a Hub id.")],
    scheme: Annotated[str, typer.Option(help="Name of a scheme, or JSON with options or a list.")],
    out: Annotated[Path, typer.Option(help="The directory to write.")],
    force: Annotated[bool, typer.Option("--force", help="Replace the directory if it is there.")] = False,
    revision: Annotated[str | None, typer.Option(help="Of a Hub id: branch, tag or commit.")] = None,
    rotary_weights: Annotated[
        str | None,
        typer.Option(help="Reorder LLaMA's rotary features: interleaved_to_halves or halves_to_interleaved."),
    ] = None,
    measure: Annotated[
        Path | None, typer.Option(help="A text file: load both, and report how far the variant is from its source.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Write the variant of a checkpoint with another position scheme, without building the model.

    Example: hf-posenc convert openai-community/gpt2 --scheme rope --out gpt2-rope

    Example: hf-posenc convert ./my-bert --scheme '["learned", {"type": "t5", "num_buckets": 64}]' --out my-bert-t5
    """
    with said_plainly():
        from ..checkpoints import convert_checkpoint

        done = convert_checkpoint(
            source,
            scheme_of(scheme),
            out,
            force=force,
            revision=revision,
            rotary_weights=rotary_weights,  # type: ignore[arg-type]
            measure=measure,
        )
    if as_json:
        typer.echo(json.dumps(dataclasses.asdict(done), default=str, indent=1))
    else:
        typer.echo(str(done))
