"""How long the inputs of a variant may be, where other tools look it up.

Tokenizers, sentence-transformers and serving tools cut inputs at the length that a checkpoint's files name. That is the
stock model's, also where the new scheme reads further.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from transformers import PreTrainedConfig

from ..config import STOCK_LENGTH_KEY
from ..errors import PosEncError
from ..patches import find_architecture
from ..schemes import Scheme
from .companions import to_json_bytes
from .source import read_json_object

LENGTH_FIELDS = {"tokenizer_config.json": "model_max_length", "sentence_*_config.json": "max_seq_length"}
"""For each file name, the field with the length at which tools cut inputs."""
FIXED_ROPE_TYPES = ("default", "linear")
"""Stock rotations whose angles do not depend on `max_position_embeddings`."""


def check_max_length(schemes: Iterable[Scheme], max_length: int) -> None:
    """Raise `PosEncError` for a length that is not positive, or longer than the table of a scheme."""
    if max_length < 1:
        raise PosEncError(f"max_length must be at least 1, got {max_length}")
    for scheme in schemes:
        table_length = None if scheme.extends else getattr(scheme, "max_positions", None)
        if table_length is not None and max_length > table_length:
            raise PosEncError(
                f"max_length={max_length} is longer than the {table_length} positions of {scheme.name}: choose a "
                "scheme that runs past its trained length, or lengthen its table"
            )


def table_length(schemes: Iterable[Scheme], config: PreTrainedConfig) -> int | None:
    """The length of a position table that was asked to be longer than what the config names; None if there is none."""
    tables = [scheme for scheme in schemes if not scheme.extends and hasattr(scheme, "max_positions")]
    length: int = min((getattr(scheme, "max_positions") for scheme in tables), default=0)  # noqa: B009
    return length if length > config_length(config) else None


def config_length(config: PreTrainedConfig) -> int:
    """The longest input that a config names, in tokens: 512 for RoBERTa's `max_position_embeddings` of 514."""
    architecture = find_architecture(config)
    assert architecture is not None
    first_row = architecture.first_row(config) if architecture.table else 0
    return config.max_position_embeddings + architecture.extra_rows - first_row


def set_config_length(config: PreTrainedConfig, max_length: int, uses_stock_table: bool) -> None:
    """Set `max_position_embeddings` of a variant's config; its schemes keep the trained length.

    The field stays as it is where it decides what the model computes: the size of a position table that is kept, or the
    angles of a scaled rotation.
    """
    architecture = find_architecture(config)
    assert architecture is not None
    shape = architecture.shape(config)
    rope_type = (shape.rope_parameters or {}).get("rope_type", "default")
    if uses_stock_table or rope_type not in FIXED_ROPE_TYPES:
        return
    if not hasattr(config, STOCK_LENGTH_KEY):
        setattr(config, STOCK_LENGTH_KEY, config.max_position_embeddings)
    config.max_position_embeddings = max_length + shape.table_first_row - architecture.extra_rows


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
