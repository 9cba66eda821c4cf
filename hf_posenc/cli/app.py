"""The command `hf-posenc`. `python -m hf_posenc` is the same.

Exit codes: 0 done, 1 something broke, 2 the request cannot be met (and what to do instead is said).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer

app = typer.Typer(
    name="hf-posenc",
    help="Change the positional encoding of BERT, GPT-2 and LLaMA checkpoints.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
Json = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]


@contextmanager
def said_plainly() -> Iterator[None]:
    """What cannot be done is a ValueError everywhere in the package: its message, and exit code 2."""
    try:
        yield
    except ValueError as error:
        typer.secho(f"error: {error}", err=True, fg=typer.colors.RED)
        raise typer.Exit(2) from None
    except KeyboardInterrupt:
        typer.secho("interrupted: nothing is left half written", err=True)
        raise typer.Exit(1) from None


def scheme_of(text: str) -> Any:
    """A scheme as it is given on a command line: a name, or JSON."""
    if not text.lstrip().startswith(("{", "[", '"')):
        return text
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"--scheme must be the name of a scheme or JSON, and {text[:500]!r} is neither: {error}"
        ) from None


@app.callback()
def main() -> None:
    """Change the positional encoding of BERT, GPT-2 and LLaMA checkpoints.

    Example: hf-posenc convert openai-community/gpt2 --scheme rope --out gpt2-rope

    Exits with 0 if it is done, 1 if something broke or was interrupted, 2 if it cannot be done as it was asked for.
    """


exit_on_user_error = said_plainly
parse_scheme_option = scheme_of
