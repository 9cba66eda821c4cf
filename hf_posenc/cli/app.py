"""The Typer application that all commands are registered on; options and output that they share; and `schemes`."""

from __future__ import annotations

import dataclasses
import json
import math
import platform
from typing import TYPE_CHECKING, Annotated

import typer

from ..errors import PosEncError
from .messages import announce_wait

if TYPE_CHECKING:
    from ..spec import PositionScheme

app = typer.Typer(
    name="hf-posenc",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
Json = Annotated[bool, typer.Option("--json", help="Print machine-readable JSON.")]


def echo_json(value: object) -> None:
    """Print a value as JSON; NaN and infinities, which JSON does not have, become null."""
    typer.echo(json.dumps(_finite(value), default=str, indent=1, allow_nan=False))


def _finite(value: object) -> object:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, (list, tuple)) else value


def parse_scheme_option(text: str) -> PositionScheme:
    """Parse a position scheme from the command line: a name, or JSON."""
    if not text.lstrip().startswith(("{", "[", '"')):
        return text
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise PosEncError(f"--scheme must be a scheme name or valid JSON, got {text[:500]!r}: {error}") from None


def _print_version(wanted: bool) -> None:
    """Print the versions that a bug report needs, without importing the packages."""
    if not wanted:
        return
    from importlib.metadata import version

    from .. import __version__

    others = ", ".join(f"{name} {version(name)}" for name in ("transformers", "torch"))
    typer.echo(f"hf_posenc {__version__} ({others}, Python {platform.python_version()})")
    raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Change the positional encoding of transformers checkpoints.

    Example: hf-posenc convert openai-community/gpt2 --scheme rope --out gpt2-rope

    Exit codes: 0 success, 1 failure or interrupt, 2 a request that cannot be met.
    """


@app.command()
def schemes(as_json: Json = False) -> None:
    """List all position schemes with their formula, paper and options.

    Example: hf-posenc schemes

    Example: hf-posenc schemes --json | jq .t5.options
    """
    with announce_wait("Loading the schemes"):
        from ..registry import list_schemes

        infos = list_schemes()
    if as_json:
        echo_json({name: dataclasses.asdict(info) for name, info in infos.items()})
    else:
        typer.echo("\n".join(map(str, infos.values())))
