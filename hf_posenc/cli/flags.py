"""Errors on the command line name the option at fault: Python arguments become flags."""

from __future__ import annotations

import re
from collections.abc import Mapping

import typer


def name_flags(message: str, flags: Mapping[str, str], values: Mapping[str, str]) -> str:
    """Say which option an error is about.

    Args:
        message: An error message that was written for Python, such as "max_length must be at least 1".
        flags: The flag of each argument, such as "--max-length" of "max_length".
        values: What was given on the command line for some of them.

    Returns:
        The message with flags in place of argument names; if it has none, with the flag whose value it mentions in
        front. A message that has a flag already is returned as it is.
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


def _contains_flag(message: str, flag: str) -> bool:
    return re.search(rf"(?<![\w-]){re.escape(flag)}(?![\w-])", message) is not None


def _to_text(value: object) -> str:
    return ",".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)


def _is_mentioned(value: str, message: str) -> bool:
    parts = {value, *(part.strip() for part in value.split(","))}
    return any(
        len(part) > 1 and re.search(rf"(?<![\w-]){re.escape(part)}(?![\w-])", message) is not None for part in parts
    )
