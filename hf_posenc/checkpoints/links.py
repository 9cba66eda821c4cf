"""Refuse links that lead out of a checkpoint: what they point to may be private, and would be copied or uploaded."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from ..errors import PosEncError
from .files import COMPANION_FILES, WEIGHT_FILES


def check_links(directory: Path, names: Iterable[str]) -> None:
    """Refuse files of a checkpoint that are links to other places, or inside a directory that is one.

    Links within the cache of the Hub, where every file is a link to a blob of the same repository, are fine.
    """
    root = directory.resolve()
    if root.parent.name == "snapshots" and root.parents[1].name.startswith("models--"):
        root = root.parents[1]
    for name in names:
        try:
            target = (directory / name).resolve()
        except (OSError, RuntimeError) as error:  # a link to itself
            raise PosEncError(f"{directory / name} cannot be read: {error}") from error
        if not target.is_relative_to(root):
            raise PosEncError(
                f"{directory / name} is a link to {target}, outside of the checkpoint, and might be private: replace "
                "the link with the file itself, or remove it"
            )


def check_checkpoint_links(directory: Path) -> None:
    """Refuse links in everything that is read from a checkpoint: config.json, weights, their index, and companions."""
    patterns = (*WEIGHT_FILES, *COMPANION_FILES)
    matches = {path for pattern in patterns for path in directory.glob(pattern) if path.is_file()}
    check_links(directory, sorted(path.relative_to(directory).as_posix() for path in matches))
