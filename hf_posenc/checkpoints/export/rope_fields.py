"""Rotary settings in config.json for transformers 4 and tools that follow it.

They do not know `rope_parameters`, and would silently rotate by their default angles.
"""

from __future__ import annotations

import json
from pathlib import Path

from ..companions import to_json_bytes

OWN_FIELDS = ("rope_theta", "partial_rotary_factor")
"""Settings that have a field of their own there; the others are in `rope_scaling`."""


def add_older_rope_fields(path: Path) -> None:
    """Repeat `rope_parameters` of a config.json in the fields of transformers 4. transformers 5 reads both alike.

    Settings per type of layer have no such fields, and are left alone.

    Args:
        path: The config.json, written by transformers.
    """
    fields = json.loads(path.read_text(encoding="utf-8"))
    parameters = fields.get("rope_parameters")
    if not parameters or any(isinstance(value, dict) for value in parameters.values()):
        return
    fields |= {name: parameters[name] for name in OWN_FIELDS if name in parameters}
    if parameters.get("rope_type", "default") != "default":
        fields["rope_scaling"] = {name: value for name, value in parameters.items() if name not in OWN_FIELDS}
    path.write_bytes(to_json_bytes(fields))
