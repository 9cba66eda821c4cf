"""What an exporter decides: the stock model that equals a variant, and how its tensors are made."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

import torch
from transformers import PreTrainedConfig

from ..weights import Transform
from .variant import Variant


@dataclasses.dataclass
class ExportPlan:
    """A stock model that computes what a variant computes."""

    config: PreTrainedConfig
    model_class: str
    """The stock class to load it with, also in `architectures` of its config."""
    variant_class: str
    """The stock class to load the variant with, for the comparison of both."""
    names: dict[str, str | None] = dataclasses.field(default_factory=dict)
    """New names of tensors by their names in the variant's files, where they differ; None: left out."""
    transforms: dict[str, Transform] = dataclasses.field(default_factory=dict)
    """How tensors change, by their names in the variant's files."""
    added: dict[str, Callable[[], torch.Tensor]] = dataclasses.field(default_factory=dict)
    """New tensors."""
    max_positions: int | None = None
    """How many positions the stock model serves; None: any number."""
    checked_position: int | None = None
    """The position of a few more tokens that are compared if the stock model takes position_ids."""
    left_out: list[str] = dataclasses.field(default_factory=list)
    """Tensors of the variant that the stock model has no use for."""
    notes: list[str] = dataclasses.field(default_factory=list)
    """What users should know about the stock model."""


@dataclasses.dataclass(frozen=True)
class Exporter:
    """One kind of export."""

    target: str
    """The model type that is written, for messages."""
    accepts: str
    """Which schemes it accepts, for messages."""
    applies: Callable[[Variant], bool]
    """Whether variants of this stock model type can be exported at all."""
    plan: Callable[[Variant, int | None], ExportPlan]
    """Makes the plan for a number of positions; raises NoStockEqual if the variant's scheme does not fit."""


TOKEN_FIELDS = ("pad_token_id", "bos_token_id", "eos_token_id")
"""Set even if they are None: the defaults of another model type are wrong."""
COMMON_FIELDS = (
    *("vocab_size", "sep_token_id", "tie_word_embeddings", "dtype", "initializer_range", "use_cache"),
    *("id2label", "label2id", "problem_type", "classifier_dropout"),
)


def common_fields(config: PreTrainedConfig, names: Mapping[str, str]) -> dict[str, object]:
    """The fields of a config that mean the same in every model type, and others by their new names."""
    fields = {name: getattr(config, name) for name in COMMON_FIELDS if getattr(config, name, None) is not None}
    fields |= {name: getattr(config, name, None) for name in TOKEN_FIELDS}
    return fields | {new: getattr(config, old) for old, new in names.items()}


def narrow_if_exact(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A computed tensor in the dtype of a checkpoint, unless that would round it."""
    narrow = tensor.to(dtype)
    return narrow if torch.equal(narrow.to(tensor.dtype), tensor) else tensor


def per_head(tensor: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    """Multiply the rows of each head by a factor, in float32 or wider."""
    wide = tensor.to(torch.promote_types(tensor.dtype, torch.float32))
    by_row = factors.to(wide.dtype).repeat_interleave(len(wide) // len(factors))
    return wide * by_row.view(-1, *[1] * (wide.dim() - 1))
