"""The commands `enable` and `disable`: whether programs that import transformers know the variants by themselves."""

from __future__ import annotations

import os
import site
import sysconfig
from pathlib import Path

import typer

from ..errors import PosEncError
from .app import app
from .messages import exit_on_user_error

HOOK_FILE, PATH_FILE = "hf_posenc_autoload.py", "hf_posenc_autoload.pth"
HOOK_SOURCE = Path(__file__).with_name("autoload_hook.py")


@app.command()
def enable() -> None:
    """Let every program of this Python environment load variants without importing hf_posenc.

    Writes two small files into site-packages. They import hf_posenc when a
    program imports transformers, and nothing else. It is off unless you run this
    command, and `hf-posenc disable` undoes it.

    Example: hf-posenc enable
    """
    with exit_on_user_error():
        directory = install_hook(_site_directories())
        typer.echo(f"Enabled in {directory}: programs that import transformers load variants. Undo: hf-posenc disable")


@app.command()
def disable() -> None:
    """Undo `hf-posenc enable`.

    Example: hf-posenc disable
    """
    with exit_on_user_error():
        removed = remove_hook(_site_directories())
        typer.echo(f"Disabled in {', '.join(map(str, removed))}" if removed else "It was not enabled")


def _site_directories() -> list[Path]:
    """The directories of this Python whose .pth files it reads, in the order in which they are tried."""
    directories = [sysconfig.get_paths()["purelib"]]
    if site.ENABLE_USER_SITE:
        directories.append(site.getusersitepackages())
    return [Path(directory) for directory in directories]


def install_hook(directories: list[Path]) -> Path:
    """Write the hook to the first directory that can be written to, and return it."""
    for directory in directories:
        if directory.is_dir() and os.access(directory, os.W_OK):
            (directory / HOOK_FILE).write_text(HOOK_SOURCE.read_text(encoding="utf-8"), encoding="utf-8")
            (directory / PATH_FILE).write_text(f"import {Path(HOOK_FILE).stem}\n", encoding="utf-8")
            return directory
    raise PosEncError(
        f"Cannot write to {' or '.join(map(str, directories))}. Use a virtual environment, or `import hf_posenc` in "
        "your program"
    )


def remove_hook(directories: list[Path]) -> list[Path]:
    """Remove the hook, and return the directories that had it."""
    removed = []
    for directory in directories:
        files = [directory / name for name in (PATH_FILE, HOOK_FILE) if (directory / name).exists()]
        for path in files:  # first the one that imports the other
            path.unlink()
        if files:
            removed.append(directory)
    return removed
