"""`hf-posenc push`."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Annotated

import typer

from .app import Json, app, said_plainly


@app.command()
def push(
    directory: Annotated[Path, typer.Argument(help="The directory of a variant.")],
    repo: Annotated[str, typer.Argument(help="Where it goes on the Hub, such as user/model; made if it is not there.")],
    private: Annotated[
        bool, typer.Option("--private", help="Make the repo private; refuse one that is public.")
    ] = False,
    revision: Annotated[str | None, typer.Option(help="Another branch than main; made if it is not there.")] = None,
    message: Annotated[str | None, typer.Option(help="Of the commit.")] = None,
    create_pr: Annotated[bool, typer.Option("--create-pr", help="Propose it as a pull request.")] = False,
    base_model: Annotated[
        str | None, typer.Option(help="Hub id of the stock checkpoint, for the card, if it is not known.")
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Also into a repo that holds something else than a variant.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Push a variant to the Hub, with a card that says what it is and how to load it.

    The token is that of `hf auth login`, or HF_TOKEN. A README.md that somebody wrote is never replaced.

    Example: hf-posenc push gpt2-rope me/gpt2-rope --private
    """
    with said_plainly():
        from ..hub.push import push_directory

        done = push_directory(
            directory,
            repo,
            private=private or None,
            revision=revision,
            message=message,
            create_pr=create_pr,
            base_model=base_model,
            force=force,
        )
    typer.echo(json.dumps(dataclasses.asdict(done), indent=1) if as_json else str(done))
