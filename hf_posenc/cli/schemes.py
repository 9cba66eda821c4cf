"""The command `schemes`."""

from __future__ import annotations

import dataclasses
import json

import typer

from .app import Json, app


@app.command()
def schemes(as_json: Json = False) -> None:
    """List all position schemes with their formula, paper and options.

    Example: hf-posenc schemes

    Example: hf-posenc schemes --json | jq .t5.options
    """
    from ..registry import list_schemes

    infos = list_schemes()
    if as_json:
        typer.echo(json.dumps({name: dataclasses.asdict(info) for name, info in infos.items()}, default=str, indent=1))
        return
    for info in infos.values():
        typer.echo(str(info))
