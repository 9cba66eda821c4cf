"""Names that training imports, until the rest of this package has them."""

from __future__ import annotations

import re
from contextlib import AbstractContextManager
from pathlib import Path

from .config_file import read_config
from .disk import fsync, is_out_of_space
from .file_names import COMPANION_FILES, LENGTH_CURVE_FILE, RECOVERY_FILE
from .manifest import verify_manifest, write_manifest
from .shards import read_shards

RUN_STATE_FILE = "run.json"
_CHECKPOINT_DIRECTORY = re.compile(r"checkpoint-(\d+)")
__all__ = [
    "COMPANION_FILES",
    "LENGTH_CURVE_FILE",
    "RECOVERY_FILE",
    "RUN_STATE_FILE",
    "checkpoint_step",
    "fsync",
    "is_out_of_space",
    "is_scheme_parameter",
    "list_checkpoints",
    "read_config",
    "read_shards",
    "translate_hub_errors",
    "verify_manifest",
    "write_manifest",
]


def is_scheme_parameter(name: str) -> bool:
    """Whether a parameter belongs to a position scheme."""
    return "position_scheme." in name


def list_checkpoints(directory: Path) -> list[Path]:
    """The `checkpoint-N` directories of a training run, newest first."""
    matches = directory.glob("checkpoint-*")
    checkpoints = [path for path in matches if path.is_dir() and _CHECKPOINT_DIRECTORY.fullmatch(path.name)]
    return sorted(checkpoints, key=checkpoint_step, reverse=True)


def checkpoint_step(checkpoint: Path) -> int:
    """The training step in the name of a `checkpoint-N` directory."""
    return int(checkpoint.name.rpartition("-")[2])


def translate_hub_errors(repo: str) -> AbstractContextManager[None]:
    """Turn errors of the Hub into messages that say what to do."""
    from ..hub.troubles import told_what_to_do

    return told_what_to_do(repo)
