"""How long the inputs of a variant may be, as its config says: `max_position_embeddings`.

Tokenizers, sentence-transformers and serving tools cut inputs at that length. The stock model's says too little where
the scheme reads further, so a variant may have another one, next to that of the stock checkpoint, for which its schemes
and its stock modules are built.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator
from typing import Any

from transformers.configuration_utils import PreTrainedConfig

from hf_posenc.config import STOCK_LENGTH_KEY
from hf_posenc.errors import PosEncError
from hf_posenc.schemes import Scheme
from hf_posenc.validation import MAX_SIZES, truncate_repr

from .architecture import Architecture
from .families import find_architecture

_lock = threading.RLock()
"""Held while a config names another length for a moment: threads may build models from one config."""


def check_max_length(schemes: Iterable[Scheme], max_length: int) -> None:
    """Raise `PosEncError` for a length that no model has, or that is longer than the table of a scheme."""
    longest = MAX_SIZES["max_position_embeddings"]
    if not isinstance(max_length, int) or not 1 <= max_length <= longest:
        raise PosEncError(f"max_length must be between 1 and {longest:,}, got {truncate_repr(max_length)}")
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
    architecture = _architecture(config)
    first_row = architecture.first_row(config) if architecture.table else 0
    return config.max_position_embeddings + architecture.extra_rows - first_row


def check_config_length(schemes: Iterable[Scheme], config: PreTrainedConfig) -> None:
    """Raise `PosEncError` if `max_position_embeddings` decides angles that the stock model computes."""
    if not any(scheme.keeps_stock_rotation() for scheme in schemes):
        return
    parameters: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
    by_layer_type = [value for value in parameters.values() if isinstance(value, dict)]
    for rotation in by_layer_type or [parameters]:
        rope_type = rotation.get("rope_type", "default")
        if rope_type == "dynamic" or (rope_type == "longrope" and rotation.get("factor") is None):
            raise PosEncError(
                f"max_position_embeddings decides the angles of the model's own {rope_type} rotation, so another "
                'length would change what it computes; give the scaling in the scheme: {"type": "rope", "scaling": '
                "{...}}"
            )


def set_config_length(
    schemes: Iterable[Scheme], config: PreTrainedConfig, max_length: int, required: bool = True
) -> bool:
    """Set `max_position_embeddings` of a variant's config; its schemes keep the trained length.

    Args:
        schemes: The schemes of the variant.
        config: Its config.
        max_length: The longest input, in tokens.
        required: Raise `PosEncError` if a scheme or the rotation does not allow this length, instead of leaving it.

    Returns:
        Whether it was set.
    """
    schemes = list(schemes)
    try:
        check_max_length(schemes, max_length)
        check_config_length(schemes, config)
    except PosEncError:
        if required:
            raise
        return False
    architecture = _architecture(config)
    if not hasattr(config, STOCK_LENGTH_KEY):
        setattr(config, STOCK_LENGTH_KEY, config.max_position_embeddings)
    first_row = architecture.shape(config).table_first_row
    config.max_position_embeddings = max_length + first_row - architecture.extra_rows
    return True


@contextlib.contextmanager
def stock_length(config: Any) -> Iterator[None]:
    """While the block runs, a config names the length of the stock checkpoint: stock modules are sized by it."""
    length = vars(config).get(STOCK_LENGTH_KEY)
    if length is None:
        yield
        return
    with _lock:
        longer, config.max_position_embeddings = config.max_position_embeddings, length
        try:
            yield
        finally:
            config.max_position_embeddings = longer


def _architecture(config: PreTrainedConfig) -> Architecture:
    architecture = find_architecture(config)
    assert architecture is not None
    return architecture
