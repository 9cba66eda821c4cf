"""Checkpoints as files: convert, inspect and export them, and write them safely."""

from .companions import Companions, remove_code_fields, to_json_bytes
from .convert import Conversion, convert_checkpoint, convert_to_stock
from .drift import Drift, read_sequences
from .export import Export, export_checkpoint
from .files import (
    COMPANION_FILES,
    LENGTH_CURVE_FILE,
    RECOVERY_FILE,
    RUN_STATE_FILE,
    check_writable,
    checkpoint_step,
    fsync,
    is_out_of_space,
    list_checkpoints,
    move_files,
    verify_manifest,
    write_manifest,
    write_text,
)
from .inspection import Inspection, inspect_checkpoint, is_scheme_parameter
from .lengths import write_max_length
from .links import check_checkpoint_links, check_links
from .loading import eval_mode, load_model, load_tokenizer
from .locks import lock_output, temporary_name
from .source import (
    find_checkpoint,
    read_config,
    read_config_fields,
    read_json,
    read_json_object,
    read_shards,
    translate_hub_errors,
)

__all__ = ["Conversion", "Drift", "Export", "Inspection"]
__all__ += ["convert_checkpoint", "convert_to_stock", "export_checkpoint", "inspect_checkpoint"]
# For other packages of hf_posenc:
__all__ += ["Companions", "check_checkpoint_links", "check_links", "remove_code_fields", "to_json_bytes"]
__all__ += ["COMPANION_FILES", "LENGTH_CURVE_FILE", "RECOVERY_FILE", "RUN_STATE_FILE"]
__all__ += [
    "checkpoint_step",
    "fsync",
    "is_out_of_space",
    "list_checkpoints",
    "lock_output",
    "move_files",
    "temporary_name",
]
__all__ += ["check_writable", "verify_manifest", "write_manifest", "write_text"]
__all__ += ["eval_mode", "is_scheme_parameter", "load_model", "load_tokenizer", "read_sequences"]
__all__ += ["write_max_length"]
__all__ += ["find_checkpoint", "read_config", "read_config_fields", "read_json", "read_json_object", "read_shards"]
__all__ += ["translate_hub_errors"]
