"""The command `hf-posenc`. `python -m hf_posenc` is the same.

Exit codes: 0 done, 1 something broke, 2 the request cannot be met (and what to do instead is said).
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
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
def _said_plainly() -> Iterator[None]:
    """What cannot be done is a ValueError everywhere in the package: its message, and exit code 2."""
    try:
        yield
    except ValueError as error:
        typer.secho(f"error: {error}", err=True, fg=typer.colors.RED)
        raise typer.Exit(2) from None


def scheme_of(text: str) -> Any:
    """A scheme as it is given on a command line: a name, or JSON."""
    if not text.lstrip().startswith(("{", "[", '"')):
        return text
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"--scheme must be the name of a scheme or JSON, and {text!r} is neither: {error}") from None


@app.callback()
def main() -> None:
    """Change the positional encoding of BERT, GPT-2 and LLaMA checkpoints."""


@app.command()
def schemes(as_json: Json = False) -> None:
    """List all schemes, what they compute, and their options."""
    import hf_posenc

    found = hf_posenc.schemes()
    if as_json:
        typer.echo(json.dumps({name: dataclasses.asdict(info) for name, info in found.items()}, default=str, indent=1))
        return
    for info in found.values():
        typer.echo(str(info))


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
    with _said_plainly():
        from .checkpoints import convert_checkpoint

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
