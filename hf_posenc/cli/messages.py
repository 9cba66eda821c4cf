"""What commands say on stderr: errors, which name the option at fault, and a line if something takes a while."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import typer

from ..errors import PosEncError

PATIENCE = 2.0
"""Seconds that a command may take without a word."""


@contextmanager
def exit_on_user_error(context: typer.Context | None = None) -> Iterator[None]:
    """Print the message of a `PosEncError`, or of a file that cannot be used, with the flag at fault, and exit with 2.

    Other exceptions are bugs and keep their traceback.
    """
    try:
        yield
    except (PosEncError, OSError) as error:
        message = name_flags(str(error), *flags_of(context))
        typer.secho(f"error: {message}", err=True, fg=typer.colors.RED)
        raise typer.Exit(2) from None
    except KeyboardInterrupt:
        typer.secho("interrupted: no partial output was left behind", err=True)
        raise typer.Exit(1) from None


@contextmanager
def announce_wait(label: str) -> Iterator[None]:
    """If the block takes longer than `PATIENCE`, print what it is doing, on stderr.

    It is one line and not a moving bar, so that it does no harm in log files or above the progress bars of the block.
    """
    timer = threading.Timer(PATIENCE, lambda: typer.echo(f"{label} ...", err=True))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def name_flags(message: str, flags: Mapping[str, str], values: Mapping[str, str]) -> str:
    """Name flags in an error message that was written for Python, such as "max_length must be at least 1".

    Names of arguments become flags. If there are none, the flag whose value is mentioned is put in front, and --scheme
    if it was given and the message is about a scheme. A message that has a flag already is returned as it is.

    Args:
        message: The error message.
        flags: The flag of each argument, such as "--max-length" of "max_length".
        values: What was given on the command line for some of them.
    """
    if any(_contains_flag(message, flag) for flag in flags.values()):
        return message
    renamed = message
    for name, flag in flags.items():
        # A single word such as "layer" means the argument only where the sentence begins with it.
        pattern = rf"(?<![\w./'\"-]){name}\b(?![./'\"-])" if "_" in name else rf"(?<=^Unknown ){name}\b|^{name}(?= )"
        renamed = re.sub(rf"(?:{pattern})=", f"{flag} ", renamed)
        renamed = re.sub(pattern, flag, renamed)
    if renamed != message:
        return renamed
    if "scheme" in values and _is_about_scheme(message):
        return f"{flags['scheme']}: {message}"
    named = [flags[name] for name, value in values.items() if name in flags and _is_mentioned(value, message)]
    return f"{named[0]}: {message}" if len(set(named)) == 1 else message


def flags_of(context: typer.Context | None) -> tuple[dict[str, str], dict[str, str]]:
    """The flags of the running command, and the texts that were given for them; nothing without a command."""
    if context is None:
        return {}, {}
    options = [option for option in context.command.params if option.param_type_name == "option" and option.opts]
    flags = {str(option.name): option.opts[0] for option in options}
    given = {name: context.params[name] for name in flags if _is_given(context, name)}
    # Numbers are everywhere, so they name no option.
    texts = {name: _to_text(value) for name, value in given.items() if not isinstance(value, (bool, int, float))}
    return flags, texts


def _is_given(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return name in context.params and source is not None and source.name == "COMMANDLINE"


def _is_about_scheme(message: str) -> bool:
    """Whether a message begins with the name of the field, or with that of a scheme: errors in its options do."""
    from ..registry import SCHEMES

    match = re.match(r"(\w+)(?:: | acts | has no layers )", message)
    return message.startswith("position_scheme") or (match is not None and match[1] in SCHEMES)


def _contains_flag(message: str, flag: str) -> bool:
    return re.search(rf"(?<![\w-]){re.escape(flag)}(?![\w-])", message) is not None


def _to_text(value: object) -> str:
    return ",".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)


def _is_mentioned(value: str, message: str) -> bool:
    parts = {value, *(part.strip() for part in value.split(","))}
    return any(
        len(part) > 1 and re.search(rf"(?<![\w-]){re.escape(part)}(?![\w-])", message) is not None for part in parts
    )
