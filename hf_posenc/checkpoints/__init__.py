"""Checkpoints as files: convert them, inspect them, and write them safely, without building the model."""

from .companions import Companions, check_links, remove_code_fields, to_json_bytes
from .convert import Conversion, convert_checkpoint
from .drift import Drift
from .files import (
    COMPANION_FILES,
    LENGTH_CURVE_FILE,
    RECOVERY_FILE,
    RUN_STATE_FILE,
    checkpoint_step,
    fsync,
    is_out_of_space,
    list_checkpoints,
    verify_manifest,
    write_manifest,
)
from .inspection import Inspection, inspect_checkpoint, is_scheme_parameter
from .lengths import check_max_length, config_length, set_config_length, write_max_length
from .loading import load_model, load_tokenizer
from .source import (
    find_checkpoint,
    read_config,
    read_config_fields,
    read_json,
    read_json_object,
    read_shards,
    translate_hub_errors,
)

__all__ = ["Conversion", "Drift", "Inspection", "convert_checkpoint", "inspect_checkpoint"]
# For other packages of hf_posenc:
__all__ += ["Companions", "check_links", "remove_code_fields", "to_json_bytes"]
__all__ += ["COMPANION_FILES", "LENGTH_CURVE_FILE", "RECOVERY_FILE", "RUN_STATE_FILE"]
__all__ += ["checkpoint_step", "fsync", "is_out_of_space", "list_checkpoints", "verify_manifest"]
__all__ += ["check_max_length", "config_length", "find_checkpoint", "set_config_length", "write_max_length"]
__all__ += ["is_scheme_parameter", "load_model", "load_tokenizer"]
__all__ += ["read_config", "read_config_fields", "read_json", "read_json_object", "read_shards"]
__all__ += ["translate_hub_errors", "write_manifest"]
