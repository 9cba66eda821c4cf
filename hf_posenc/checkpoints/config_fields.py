"""Check the fields of a config.json that someone else wrote, before transformers builds a config from them.

Transformers sets every field as an attribute: a field can replace a method, or choose the code or the weights to load.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig
from transformers.utils import CONFIG_NAME, SAFE_WEIGHTS_NAME

from ..config import variant_config_class
from ..errors import PosEncError
from ..model_types import VARIANT_PREFIX
from ..patches import ARCHITECTURES
from ..validation import MAX_SIZES, check_model_sizes, truncate_repr

IMPLEMENTATION = "_implementation"
"""Part of the names of fields that choose code for attention or experts."""
CLASS_SETTINGS = ("attribute_map", "_auto_class")
"""Attributes of config classes that a file may only repeat."""
INTERNAL_ATTRIBUTES = ("sub_configs", "sub_configs_defaults", "scheme_origin", "_position_specs")
"""Attributes of configs, stock or variant, that no file may set; methods and other callables are refused too."""


def check_config_fields(fields: Mapping[str, Any], path: Path) -> None:
    """Refuse fields of a config.json that would break the config, choose code or other weights, or have absurd sizes.

    Args:
        fields: What the file contains.
        path: The file, for errors.

    Raises:
        PosEncError: If a field is refused. The message names it.
    """
    model_type = fields.get("model_type")
    if not isinstance(model_type, str):
        raise PosEncError(f"{path} is not a transformers config: it has no model_type")
    config_class = _config_class(model_type)
    _refuse_attributes(fields, config_class, path)
    check_model_sizes(fields)
    for alias in config_class.attribute_map:
        if alias in MAX_SIZES and alias in fields and fields[alias] is None:
            raise PosEncError(f"config.{alias} must be an integer, got null")
    architectures = fields.get("architectures")
    if architectures is not None and not _are_strings(architectures):
        raise PosEncError(f"config.architectures must be a list of class names, got {truncate_repr(architectures)}")
    weights = fields.get("transformers_weights")
    if weights not in (None, SAFE_WEIGHTS_NAME):
        raise PosEncError(
            f"{path} names another weights file: transformers_weights = {truncate_repr(weights)}. Remove the field; "
            f"weights are read from {SAFE_WEIGHTS_NAME} or its shards"
        )
    check_implementations(fields, path)


def check_implementations(value: object, path: Path) -> None:
    """Refuse attention code from the Hub, such as `"attn_implementation": "user/kernel"`: transformers would run it.

    Anywhere in a JSON file, such a field must be null, the name of an implementation, or a dict of names.
    """
    if isinstance(value, list):
        for item in value:
            check_implementations(item, path)
    if not isinstance(value, dict):
        return
    for name, setting in value.items():
        if IMPLEMENTATION in name and setting is not None:
            names = list(setting.values()) if isinstance(setting, dict) else [setting]
            if not _are_strings(names):
                raise PosEncError(
                    f"{path}: {truncate_repr(name, str)} must be the name of an implementation, such as sdpa, or a "
                    f"dict of names, got {truncate_repr(setting)}"
                )
            if any("/" in item for item in names):
                raise PosEncError(
                    f"{path} names code to download and run: {truncate_repr(name, str)} = {truncate_repr(setting)}. "
                    "Remove the field, and pass attn_implementation to from_pretrained if you trust that code"
                )
        check_implementations(setting, path)


def _config_class(model_type: str) -> type[PreTrainedConfig]:
    """The config class that a supported model has as a variant, or may get; else the base class of all configs."""
    architecture = ARCHITECTURES.get(model_type.removeprefix(VARIANT_PREFIX))
    return PreTrainedConfig if architecture is None else variant_config_class(architecture.config_class)


def _refuse_attributes(fields: Mapping[str, Any], config_class: type[PreTrainedConfig], path: Path) -> None:
    """Refuse fields with the names of methods, and others that replace what belongs to the class."""
    for name, value in fields.items():
        attribute = getattr(config_class, name, None)
        is_changed = name in CLASS_SETTINGS and value != attribute
        if is_changed or name in INTERNAL_ATTRIBUTES or name.startswith("__") or callable(attribute):
            raise PosEncError(
                f"{path} has a field {truncate_repr(name)}, which is part of transformers' configs themselves and not "
                f"a setting of a model: remove it from {CONFIG_NAME}"
            )


def _are_strings(values: object) -> bool:
    return isinstance(values, list) and all(isinstance(value, str) for value in values)
