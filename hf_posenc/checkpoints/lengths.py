"""The length of a variant's inputs in the files of other tools: tokenizers and sentence-transformers."""

from __future__ import annotations

from pathlib import Path

from .companions import to_json_bytes
from .source import read_json_object

LENGTH_FIELDS = {"tokenizer_config.json": "model_max_length", "sentence_*_config.json": "max_seq_length"}
"""For each file name, the field with the length at which tools cut inputs."""


def write_max_length(directory: Path, max_length: int, lower: bool) -> None:
    """Write the length to the files of a tokenizer and of sentence-transformers, where they have a smaller one.

    With `lower`, a larger one is replaced too.
    """
    files = {path: field for name, field in LENGTH_FIELDS.items() for path in directory.glob(name)}
    for path, field in files.items():
        values = read_json_object(path)
        current = values.get(field)
        if isinstance(current, (int, float)) and (lower or current < max_length):
            path.write_bytes(to_json_bytes({**values, field: max_length}))
