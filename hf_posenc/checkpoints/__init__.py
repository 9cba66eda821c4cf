"""Checkpoints as files: converted without building the model they hold."""

from __future__ import annotations

from ._names import (
    COMPANION_FILES,
    LENGTH_CURVE_FILE,
    RECOVERY_FILE,
    RUN_STATE_FILE,
    checkpoint_step,
    fsync,
    is_out_of_space,
    is_scheme_parameter,
    list_checkpoints,
    read_config,
    read_shards,
    translate_hub_errors,
    verify_manifest,
    write_manifest,
)
from .convert import Conversion, convert_checkpoint

__all__ = [
    "COMPANION_FILES",
    "LENGTH_CURVE_FILE",
    "RECOVERY_FILE",
    "RUN_STATE_FILE",
    "Conversion",
    "checkpoint_step",
    "convert_checkpoint",
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
