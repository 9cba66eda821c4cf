"""Checkpoints as files: convert them, inspect them, and write them safely, without building the model."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .convert import Conversion as Conversion
    from .convert import convert_checkpoint as convert_checkpoint
    from .download import download_checkpoint as download_checkpoint
    from .download import translate_hub_errors as translate_hub_errors
    from .drift import Drift as Drift
    from .drift import measure_drift as measure_drift
    from .files import COMPANION_FILES as COMPANION_FILES
    from .files import LENGTH_CURVE_FILE as LENGTH_CURVE_FILE
    from .files import RECOVERY_FILE as RECOVERY_FILE
    from .files import RUN_STATE_FILE as RUN_STATE_FILE
    from .files import WEIGHT_FILES as WEIGHT_FILES
    from .files import atomic_directory as atomic_directory
    from .files import checkpoint_step as checkpoint_step
    from .files import companion_files as companion_files
    from .files import fsync as fsync
    from .files import is_out_of_space as is_out_of_space
    from .files import list_checkpoints as list_checkpoints
    from .files import resolve_output_dir as resolve_output_dir
    from .files import verify_manifest as verify_manifest
    from .files import write_manifest as write_manifest
    from .inspection import Inspection as Inspection
    from .inspection import inspect_checkpoint as inspect_checkpoint
    from .shards import Shard as Shard
    from .shards import TensorInfo as TensorInfo
    from .shards import read_shards as read_shards
    from .source import read_config as read_config
    from .source import read_config_fields as read_config_fields
    from .source import read_json_object as read_json_object
    from .weight_check import is_scheme_parameter as is_scheme_parameter
    from .weight_layout import RotaryChange as RotaryChange
    from .weight_layout import extend_table as extend_table
    from .weight_layout import reorder_rotary as reorder_rotary

# Resolved on first use, because most of these modules import torch and transformers.
_EXPORTS = {
    "convert": ("Conversion", "convert_checkpoint"),
    "download": ("download_checkpoint", "translate_hub_errors"),
    "drift": ("Drift", "measure_drift"),
    "files": (
        *("COMPANION_FILES", "LENGTH_CURVE_FILE", "RECOVERY_FILE", "RUN_STATE_FILE", "WEIGHT_FILES"),
        *("atomic_directory", "checkpoint_step", "companion_files", "fsync", "is_out_of_space"),
        *("list_checkpoints", "resolve_output_dir", "verify_manifest", "write_manifest"),
    ),
    "inspection": ("Inspection", "inspect_checkpoint"),
    "shards": ("Shard", "TensorInfo", "read_shards"),
    "source": ("read_config", "read_config_fields", "read_json_object"),
    "weight_check": ("is_scheme_parameter",),
    "weight_layout": ("RotaryChange", "extend_table", "reorder_rotary"),
}
_MODULES = {name: module for module, names in _EXPORTS.items() for name in names}
__all__ = sorted(_MODULES)


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_MODULES[name]}", __name__), name)
