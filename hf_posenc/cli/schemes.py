"""`hf-posenc schemes`."""

from __future__ import annotations

import dataclasses
import json

import typer

from .app import Json, app


@app.command()
def schemes(as_json: Json = False) -> None:
    """List all schemes, what they compute, and their options.

    Example: hf-posenc schemes

    Example: hf-posenc schemes --json | jq .t5.options
    """
    import hf_posenc

    found = hf_posenc.list_schemes()
    if as_json:
        typer.echo(json.dumps({name: dataclasses.asdict(info) for name, info in found.items()}, default=str, indent=1))
        return
    for info in found.values():
        typer.echo(str(info))
