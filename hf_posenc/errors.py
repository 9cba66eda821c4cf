"""The errors that users see when a request cannot be honoured, and how to install what they need."""

from __future__ import annotations

INSTALL_SOURCE: str | None = "git+https://github.com/hf-posenc/hf_posenc"
"""Where pip finds the package. None once a release is on PyPI; until then, anyone could register its name there."""


def install_command(extra: str | None = None) -> str:
    """The command that installs the package: the only source of it in errors, saved files and pages.

    Args:
        extra: A group of optional dependencies, such as "train".

    Returns:
        A line for the shell.

    Example:
        >>> install_command("train")
        "pip install 'hf_posenc[train] @ git+https://github.com/hf-posenc/hf_posenc'"
    """
    name = "hf_posenc" if extra is None else f"hf_posenc[{extra}]"
    requirement = name if INSTALL_SOURCE is None else f"{name} @ {INSTALL_SOURCE}"
    return f"pip install '{requirement}'"


class PosEncError(ValueError):
    """Something the caller asked for cannot be done: an unknown scheme, an unsupported model, a damaged checkpoint.

    The message names the value at fault, what is accepted instead, and the way out. Bugs in the package raise other
    exceptions, so catching `PosEncError` never hides one.
    """


class SequenceLengthError(PosEncError):
    """The input is longer than a model or its position scheme can process; a shorter one would be accepted."""
