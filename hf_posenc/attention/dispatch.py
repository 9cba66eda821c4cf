"""Which path computes an attention, and why: a pure function of what is known before it starts."""

from __future__ import annotations

import enum
from typing import NamedTuple

import torch

from ..schemes import DistanceBias

SCORE_BACKENDS = ("sdpa", "eager", "flex_attention")
"""Backends that can add score terms."""
VALUE_BACKENDS = ("sdpa", "eager")
"""Backends that can add vectors to the values."""
FLEX_DROPOUT_ERROR = (
    "flex_attention does not support dropout: call model.eval(), set the attention dropout to 0, or use "
    'attn_implementation="sdpa"'
)


class AttentionPath(enum.Enum):
    """How an attention is computed."""

    STOCK = "stock attention function, unchanged"
    STRIDED_BIAS = "SDPA with the bias as a strided view of one vector per head"
    STRIDED_BIAS_UNPADDED = "SDPA on each row without its padding, bias as a strided view of one vector per head"
    CHUNKED = "a few heads and queries at a time, in memory linear in the sequence length"
    DENSE_BIAS_BY_HEADS = "SDPA with a dense bias, a few heads at a time"
    DENSE_BIAS = "stock attention function with a dense bias"
    DENSE_WEIGHTS = "explicit attention weights, to add vectors to the values"
    FLEX = "flex_attention with a score_mod that reads vectors and tables"
    REFUSED = "not supported"


class MaskKind(enum.Enum):
    """What is known about the attention mask."""

    NONE = "no mask"
    PADDING = "padding at the ends of rows"
    OTHER = "any other mask"


class DispatchKey(NamedTuple):
    """Everything that the choice of a path depends on. A NamedTuple, because one is built per layer and token."""

    backend: str
    term_types: frozenset[type]
    """The types of the score terms."""
    has_value_terms: bool = False
    """Whether vectors are added to the values."""
    uniform: bool = True
    """Whether distances are the same slot by slot for every query (no gaps, no packed rows)."""
    mask: MaskKind = MaskKind.NONE
    single_query: bool = False
    on_cpu: bool = True
    tracing: bool = False
    requires_grad: bool = False
    mask_requires_grad: bool = False
    dropout: bool = False

    @property
    def by_distance_only(self) -> bool:
        return self.term_types == {DistanceBias} and not self.has_value_terms


def select_path(key: DispatchKey) -> tuple[AttentionPath, str]:
    """Choose the cheapest exact path.

    With dropout, the path must not depend on whether gradients are needed: checkpointing runs a layer first without
    them and then with them, and both runs must drop the same weights.

    Args:
        key: What is known about the attention.

    Returns:
        The path, and the reason for it. For `AttentionPath.REFUSED`, the reason is the error message.

    Example:
        >>> select_path(DispatchKey("sdpa", frozenset({DistanceBias})))[0]
        <AttentionPath.STRIDED_BIAS: 'SDPA with the bias as a strided view of one vector per head'>
    """
    no_terms = not key.term_types and not key.has_value_terms
    if no_terms and key.backend != "flex_attention":
        return AttentionPath.STOCK, "nothing is added to scores or values"
    if key.backend not in (VALUE_BACKENDS if key.has_value_terms else SCORE_BACKENDS):
        return AttentionPath.REFUSED, f"{key.backend} cannot add to the {'values' if key.has_value_terms else 'scores'}"
    if key.backend == "flex_attention":
        if key.dropout:
            return AttentionPath.REFUSED, FLEX_DROPOUT_ERROR
        if torch.Tensor in key.term_types or not key.uniform:
            return AttentionPath.FLEX, "terms that cannot be looked up by distance are passed as dense tensors"
        return AttentionPath.FLEX, "nothing is added" if no_terms else "the kernel adds the terms through score_mod"
    dense = AttentionPath.DENSE_WEIGHTS if key.has_value_terms else AttentionPath.DENSE_BIAS
    if key.backend != "sdpa":
        return dense, f"{key.backend} attention is dense anyway"
    if key.single_query:
        return dense, "with a single query, the bias is one row"
    if key.tracing or not key.on_cpu:
        where = "compiled or exported code" if key.tracing else "kernels of other devices"
        return dense, f"{where} would copy a strided view; flex_attention avoids a dense bias"
    if key.mask_requires_grad:
        return dense, "the mask requires a gradient"
    if not key.uniform:
        all_heads = key.has_value_terms or key.requires_grad or key.dropout
        return (
            dense if all_heads else AttentionPath.DENSE_BIAS_BY_HEADS,
            "with gaps or packed rows, every pair of query and key has its own distance",
        )
    if not key.by_distance_only:
        what = "vectors are added to the values" if key.has_value_terms else "terms depend on content or positions"
        return AttentionPath.CHUNKED, f"{what}: computed per chunk, and again in the backward pass"
    if key.dropout:
        return AttentionPath.CHUNKED, "the backward pass must drop the same weights as the forward pass"
    if key.mask is MaskKind.NONE:
        return AttentionPath.STRIDED_BIAS, "the bias depends on head and distance only, and there is no padding"
    if key.mask is MaskKind.PADDING:
        return (
            AttentionPath.STRIDED_BIAS_UNPADDED,
            "the bias depends on head and distance only, and padding is at the ends of rows",
        )
    return AttentionPath.CHUNKED, "the mask is not a function of the distance"
