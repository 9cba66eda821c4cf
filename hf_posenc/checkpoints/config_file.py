"""config.json as strangers write it: looked at before transformers builds anything of it, and nothing of it is run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from transformers import AutoConfig
from transformers.utils import CONFIG_NAME, cached_file

from ..validation import (
    MAX_CONFIG_DEPTH,
    MAX_CONFIG_STRING,
    MAX_CONFIG_VALUES,
    check_json_limits,
    check_model_sizes,
    truncate_repr,
)

LARGEST_FILE = 64 * 2**20
"""Bytes of a config.json, or of a note beside it, that is still read."""
KINDS = {CONFIG_NAME: "config of transformers", "run.json": "note of a training run"}


def read_json(path: Path) -> dict[str, Any]:
    """A JSON file that holds a table. Raises ValueError for any other, and for one that is out of all measure."""
    try:
        if path.stat().st_size > LARGEST_FILE:
            raise ValueError(f"it has {path.stat().st_size:,} bytes, and may have {LARGEST_FILE:,}")
        values = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(values, dict):
            raise ValueError("it holds no table of names and values")
        check_json_limits(values, path.name, MAX_CONFIG_DEPTH, MAX_CONFIG_VALUES, MAX_CONFIG_STRING)
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} is no {KINDS.get(path.name, 'table')}: {truncate_repr(error)}") from None
    return values


def read_fields(directory: Path) -> dict[str, Any]:
    """The fields of a directory's config.json, whose sizes are those of a model. ValueError for all else."""
    path = directory / CONFIG_NAME
    if not path.is_file():
        raise ValueError(f"{directory} has no {CONFIG_NAME}, so that it is no checkpoint of transformers")
    fields = read_json(path)
    if not isinstance(fields.get("model_type"), str):
        raise ValueError(f"{path} is no config of transformers: it names no model_type")
    check_model_sizes(fields)
    return fields


def read_config(source: str | Path, revision: str | None = None) -> Any:
    """The config of a checkpoint's directory or Hub id. Raises ValueError for whatever is wrong with it."""
    directory = Path(source).expanduser()
    place: str | Path = directory if directory.is_dir() else str(source)
    try:
        if not directory.is_dir():
            found = cached_file(str(source), CONFIG_NAME, revision=revision)
            assert found is not None
            directory = Path(found).parent
        read_fields(directory)
        return AutoConfig.from_pretrained(place, revision=revision, trust_remote_code=False)
    except ValueError:
        raise
    except Exception as error:  # whatever a constructor of transformers makes of wrong types
        raise ValueError(f"the config of {source} cannot be read: {truncate_repr(error)}") from error
