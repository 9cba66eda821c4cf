"""Which way an attention is computed, and why: a pure function of what the engine knows before it begins."""

from __future__ import annotations

import enum
from typing import NamedTuple

import torch

from ..schemes.terms import DistanceBias

SCORE_BACKENDS = ("sdpa", "eager", "flex_attention")
VALUE_BACKENDS = ("sdpa", "eager")
FLEX_DROPOUT_ERROR = (
    "flex_attention has no dropout: call model.eval(), set the attention dropout to 0, or use "
    'attn_implementation="sdpa"'
)


class AttentionPath(enum.Enum):
    """The ways, each with what is special about it."""

    STOCK = "the stock function, untouched"
    STRIDED_BIAS = "stock kernel, bias as a view of one vector a head"
    STRIDED_BIAS_UNPADDED = "stock kernel on each row without its padding, bias as a view of one vector a head"
    CHUNKED = "some heads and queries at a time, in memory linear in the length"
    DENSE_BIAS_BY_HEADS = "stock kernel, bias written out for some heads at a time"
    DENSE_BIAS = "stock kernel, bias written out"
    DENSE_WEIGHTS = "weights written out, to join the vectors of the values"
    FLEX = "flex_attention, with a score_mod that looks up vectors and tables"
    REFUSED = "refused"


class MaskKind(enum.Enum):
    """What the engine knows of the mask."""

    NONE = "no mask"
    PADDING = "padding at the ends of rows"
    OTHER = "any other"


class DispatchKey(NamedTuple):
    """Everything that the choice depends on. Made for every layer and token, so of a kind that is made fast."""

    backend: str
    forms: frozenset[type]
    """Of the score terms."""
    values: bool = False
    """Whether vectors join the values."""
    uniform: bool = True
    """Whether every query sees its keys at the same distances by slot."""
    mask: MaskKind = MaskKind.NONE
    one_query: bool = False
    on_cpu: bool = True
    tracing: bool = False
    gradient: bool = False
    mask_requires_grad: bool = False
    dropout: bool = False

    @property
    def by_distance(self) -> bool:
        return bool(self.forms) and all(form is DistanceBias for form in self.forms) and not self.values


def select_path(now: DispatchKey) -> tuple[AttentionPath, str]:
    """The cheapest exact way, and the reason for it.

    With dropout the way must not depend on whether there are gradients: checkpointing runs a layer first without them
    and then with them, and both must drop the same.
    """
    nothing = not now.forms and not now.values
    if nothing and now.backend != "flex_attention":
        return AttentionPath.STOCK, "nothing is added to scores or values"
    if now.backend not in (VALUE_BACKENDS if now.values else SCORE_BACKENDS):
        return AttentionPath.REFUSED, f"{now.backend} can add nothing to {'values' if now.values else 'scores'}"
    if now.backend == "flex_attention":
        if now.dropout:
            return AttentionPath.REFUSED, FLEX_DROPOUT_ERROR
        if torch.Tensor in now.forms or not now.uniform:
            return AttentionPath.FLEX, "what is not by slot, or of no form that could be looked up, is written out"
        return AttentionPath.FLEX, "nothing is added" if nothing else "the scores can be changed in the kernel"
    written = AttentionPath.DENSE_WEIGHTS if now.values else AttentionPath.DENSE_BIAS
    if now.backend != "sdpa":
        return written, f"{now.backend} writes out everything"
    if now.one_query:
        return written, "one query: no more than a row"
    if now.tracing or not now.on_cpu:
        where = "compiled or exported code" if now.tracing else "kernels of other devices"
        return written, f"{where} would copy a view; flex_attention writes out nothing"
    if now.mask_requires_grad:
        return written, "the mask itself is to get a gradient"
    if not now.uniform:
        alone = now.values or now.gradient or now.dropout
        return (
            written if alone else AttentionPath.DENSE_BIAS_BY_HEADS,
            "positions with gaps or documents: a distance for each pair",
        )
    if now.by_distance and not now.dropout:
        if now.mask is MaskKind.NONE:
            return AttentionPath.STRIDED_BIAS, "by head and distance only, and nothing is hidden but keys ahead"
        if now.mask is MaskKind.PADDING:
            return AttentionPath.STRIDED_BIAS_UNPADDED, "by head and distance only, and padding is at the ends of rows"
        return AttentionPath.CHUNKED, "a mask that is no function of the distance"
    if now.by_distance:
        return AttentionPath.CHUNKED, "dropout: the backward pass must drop what the forward pass did"
    what = "vectors join the values" if now.values else "terms of the content or of places"
    return AttentionPath.CHUNKED, f"{what}: written out for a chunk, and made anew in the backward pass"
