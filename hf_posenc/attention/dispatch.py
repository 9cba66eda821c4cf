"""One attention to compute, which path computes it, and why: a pure function of what is known before it starts.

Shape legend: B batch, H heads, G key heads, Q queries, K keys, D head size.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import importlib.util
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import nn

from ..errors import PosEncError
from ..schemes import Content, DistanceBias, DistanceTable, Positions, Remap, Term, is_tracing
from .masks import AttentionMask
from .triton_support import TRITON_SETTING, triton_computes

SCORE_BACKENDS = ("sdpa", "eager", "flex_attention")
VALUE_BACKENDS = ("sdpa", "eager")
FLEX_DROPOUT_ERROR = (
    "flex_attention does not support dropout: call model.eval(), set the attention dropout to 0, or use "
    'attn_implementation="sdpa"'
)
CAPS_OR_SINKS_ERROR = (
    "this model caps its attention logits or adds attention sinks, which is supported for schemes that add to the "
    'scores only, with attn_implementation="eager" or "sdpa": a scheme that adds to the values, such as shaw, needs '
    '"values": false'
)
REMAP_BACKEND_ERROR = (
    '{backend} cannot rotate far keys apart from near ones, as rope\'s extend does: use attn_implementation="sdpa" or '
    '"eager"'
)
REMAP_TERMS_ERROR = (
    "rope's extend computes near and far keys apart, where no other scheme can add to the scores or values: use one of "
    "the two in each layer"
)
REMAP_CAPS_ERROR = (
    "this model caps its attention logits or adds attention sinks, which rope's extend supports with "
    'attn_implementation="eager" only'
)
HEADS_PER_CHUNK = 4
"""Tuned on CPU: 1 underuses cores, 2 adds call overhead, more than 4 spills the cache."""
FLEX_MIN_SCORES = 2**24
"""From so many scores on, batch x heads x queries x keys, flex_attention is taken where a bias would be written out."""
FLEX_SETTING = "HF_POSENC_FLEX_MIN_SCORES"
"""The environment variable that replaces this number, or turns it "off"."""
AttentionOutput: TypeAlias = tuple[torch.Tensor, torch.Tensor | None]
"""The output, (B, Q, H, D), and the attention weights if they were computed explicitly."""


@dataclasses.dataclass(frozen=True)
class AttentionCall:
    """The inputs of one layer's attention, and the terms that its schemes add."""

    module: nn.Module
    stock: Callable[..., AttentionOutput]
    """The stock attention function of the model's backend."""
    query: torch.Tensor
    """(B, H, Q, D), rotated, and scaled if a scheme scales the content."""
    key: torch.Tensor
    """(B, G, K, D), without the empty slots of a static cache on a causal first call."""
    value: torch.Tensor
    attention_mask: AttentionMask
    causal: bool
    """Whether queries must not see later keys, and no mask says so."""
    scaling: float
    dropout: float
    terms: list[Term]
    value_tables: list[DistanceTable]
    """Vectors per distance that are added to the values."""
    positions: Positions
    content: Content
    stock_kwargs: dict[str, Any]
    remap: Remap | None = None
    """Other rotations for far keys."""

    @property
    def tensor_mask(self) -> torch.Tensor | None:
        assert self.attention_mask is None or isinstance(self.attention_mask, torch.Tensor)
        return self.attention_mask

    def run_stock(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None
    ) -> AttentionOutput:
        kwargs = {"scaling": self.scaling, "dropout": self.dropout, **self.stock_kwargs}
        return self.stock(self.module, query, key, value, mask, **kwargs)


def _requires_grad(term: Term | DistanceTable) -> bool:
    if isinstance(term, torch.Tensor):
        return term.requires_grad
    return any(_requires_grad(getattr(term, field.name)) for field in dataclasses.fields(term))


def has_caps_or_sinks(kwargs: dict[str, Any]) -> bool:
    """Whether a layer asks the attention function to cap logits (Gemma 2) or to add attention sinks (GPT-OSS)."""
    return any(kwargs.get(name) is not None for name in ("softcap", "s_aux"))


def iter_head_slices(query: torch.Tensor, key: torch.Tensor) -> Iterator[tuple[slice, slice]]:
    """A few heads at a time, with the key heads they share."""
    num_key_heads = key.shape[1]
    heads_per_key = query.shape[1] // num_key_heads
    step = max(HEADS_PER_CHUNK // heads_per_key, 1)
    for start in range(0, num_key_heads, step):
        stop = min(start + step, num_key_heads)
        yield slice(start * heads_per_key, stop * heads_per_key), slice(start, stop)


def slice_heads(tensor: torch.Tensor, axis: int, heads: slice) -> torch.Tensor:
    """A view of some heads; a tensor with one head for all stays as it is."""
    return tensor if tensor.shape[axis] == 1 else tensor.narrow(axis, heads.start, heads.stop - heads.start)


def flex_min_scores() -> int | None:
    """The number of scores from which flex_attention is taken on CUDA without being asked for; None: never.

    Raises:
        PosEncError: If the environment variable `HF_POSENC_FLEX_MIN_SCORES` is neither a number nor "off".
    """
    value = os.environ.get(FLEX_SETTING, str(FLEX_MIN_SCORES)).strip().lower()
    if value == "off":
        return None
    if not value.isdecimal():
        raise PosEncError(f'{FLEX_SETTING} must be a number of scores or "off", got {value!r}')
    return int(value)


def flex_pays(call: AttentionCall) -> bool:
    """Whether flex_attention is better than writing the bias out: on CUDA, for large inputs, without dense terms."""
    query = call.query
    if is_tracing() or not runs_flex_kernels(query.device):
        return False
    least = flex_min_scores()
    num_scores = query.shape[0] * query.shape[1] * query.shape[2] * call.key.shape[2]
    is_large = least is not None and num_scores >= least
    return is_large and call.positions.uniform and not has_dense_terms(call.terms)


def has_dense_terms(terms: Sequence[Term]) -> bool:
    """Whether a term is a tensor with a number for each pair of query and key, which flex_attention would read too."""
    return any(isinstance(term, torch.Tensor) and term.shape[2] > 1 for term in terms)


@functools.cache
def runs_flex_kernels(device: torch.device) -> bool:
    """Whether flex_attention has kernels for a device: GPUs from A100 on, where Triton is installed."""
    if device.type != "cuda" or importlib.util.find_spec("triton") is None:
        return False
    return torch.cuda.get_device_capability(device) >= (8, 0)


class AttentionPath(enum.Enum):
    """How an attention is computed."""

    STOCK = "stock attention function, unchanged"
    STRIDED_BIAS = "SDPA with the bias as a strided view of one vector per head"
    STRIDED_BIAS_UNPADDED = "SDPA on each row without its padding, bias as a strided view of one vector per head"
    CHUNKED = "a few heads and queries at a time, in memory linear in the sequence length"
    DENSE_BIAS_BY_HEADS = "SDPA with a dense bias, a few heads at a time"
    DENSE_BIAS = "stock attention function with a dense bias"
    DENSE_WEIGHTS = "explicit attention weights, to add vectors to the values"
    REMAPPED_MERGED = "near and far keys by separate flash kernel calls, merged by their log-sum-exp"
    REMAPPED_CHUNKED = "near and far keys in one softmax, a few heads and queries at a time"
    REMAPPED_DENSE = "near and far keys in one softmax, with explicit attention weights"
    FLEX = "flex_attention with a score_mod that reads vectors and tables"
    TRITON = "Triton kernels that read the bias from one vector per head"
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
    has_value_terms: bool = False
    uniform: bool = True
    mask: MaskKind = MaskKind.NONE
    single_query: bool = False
    on_cpu: bool = True
    tracing: bool = False
    requires_grad: bool = False
    mask_requires_grad: bool = False
    dropout: bool = False
    caps_or_sinks: bool = False
    """Whether the stock function caps logits or adds attention sinks, which paths of our own do not know."""
    remapped: bool = False
    """Whether far keys have another rotation than near ones."""
    flex_pays: bool = False
    """Whether flex_attention is better than a dense bias, if it can be used."""
    triton_computes: bool = False
    """Whether the Triton kernels are switched on and can replace flex_attention where it is better."""

    @classmethod
    def of(cls, call: AttentionCall) -> DispatchKey:
        mask = call.attention_mask
        in_window = call.stock_kwargs.get("sliding_window") is not None
        is_padding = mask is not None and call.positions.spans is not None and not in_window
        inputs = (call.query, call.key, call.value, *call.terms, *call.value_tables)
        is_large = flex_pays(call)
        return cls(
            backend=call.positions.backend,
            term_types=frozenset(map(type, call.terms)),
            has_value_terms=bool(call.value_tables),
            uniform=call.positions.uniform,
            mask=MaskKind.PADDING if is_padding else MaskKind.NONE if mask is None else MaskKind.OTHER,
            single_query=call.query.shape[2] < 2,
            on_cpu=call.query.device.type == "cpu",
            tracing=is_tracing(),
            requires_grad=torch.is_grad_enabled() and any(map(_requires_grad, inputs)),
            mask_requires_grad=isinstance(mask, torch.Tensor) and mask.requires_grad,
            dropout=call.dropout > 0,
            caps_or_sinks=has_caps_or_sinks(call.stock_kwargs),
            remapped=call.remap is not None,
            flex_pays=is_large,
            triton_computes=is_large and triton_computes(call),
        )


def select_path(key: DispatchKey) -> tuple[AttentionPath, str]:
    """Choose the cheapest exact path.

    With dropout, the path must not depend on whether gradients are needed: checkpointing runs a layer first without
    them and then with them, and both runs must drop the same weights.

    Returns:
        The path, and the reason for it. For `AttentionPath.REFUSED`, the reason is the error message.

    Example:
        >>> select_path(DispatchKey("sdpa", frozenset({DistanceBias})))[0]
        <AttentionPath.STRIDED_BIAS: 'SDPA with the bias as a strided view of one vector per head'>
    """
    no_terms = not key.term_types and not key.has_value_terms
    if key.remapped:
        return _select_remapped(key, no_terms)
    if no_terms and key.backend != "flex_attention":
        return AttentionPath.STOCK, "nothing is added to scores or values"
    if key.backend not in (VALUE_BACKENDS if key.has_value_terms else SCORE_BACKENDS):
        return AttentionPath.REFUSED, f"{key.backend} cannot add to the {'values' if key.has_value_terms else 'scores'}"
    if key.caps_or_sinks:
        if key.has_value_terms or key.backend == "flex_attention":
            return AttentionPath.REFUSED, CAPS_OR_SINKS_ERROR
        return AttentionPath.DENSE_BIAS, "only the stock function caps logits or adds attention sinks"
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
    if key.triton_computes and not (key.tracing or key.has_value_terms or key.mask_requires_grad):
        return AttentionPath.TRITON, f"{TRITON_SETTING}=1, and each query sees a span of keys"
    if key.flex_pays and not (key.tracing or key.has_value_terms or key.dropout or key.mask_requires_grad):
        reason = f"on CUDA, large inputs take flex_attention, which writes no bias out; {FLEX_SETTING} sets from when"
        return AttentionPath.FLEX, reason
    if key.tracing or not key.on_cpu:
        where = "compiled or exported code" if key.tracing else "kernels of other devices"
        return dense, f"{where} would copy a strided view; flex_attention avoids a dense bias"
    if key.mask_requires_grad:
        return dense, "the mask requires a gradient"
    if not key.uniform:
        all_heads = key.has_value_terms or key.requires_grad or key.dropout
        return (
            dense if all_heads else AttentionPath.DENSE_BIAS_BY_HEADS,
            "with gaps in position_ids, every pair of query and key has its own distance",
        )
    if key.has_value_terms or key.term_types != {DistanceBias}:
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


def _select_remapped(key: DispatchKey, no_terms: bool) -> tuple[AttentionPath, str]:
    """The path for attention in which far keys have another rotation."""
    if key.backend not in VALUE_BACKENDS:
        return AttentionPath.REFUSED, REMAP_BACKEND_ERROR.format(backend=key.backend)
    if not no_terms:
        return AttentionPath.REFUSED, REMAP_TERMS_ERROR
    if key.backend == "eager":
        return AttentionPath.REMAPPED_DENSE, "eager attention is dense anyway"
    if key.caps_or_sinks:
        return AttentionPath.REFUSED, REMAP_CAPS_ERROR
    if key.single_query:
        return AttentionPath.REMAPPED_DENSE, "with a single query, the weights are one row"
    if key.tracing:
        return AttentionPath.REMAPPED_DENSE, "in compiled or exported code, tensors cannot be read to find far keys"
    if key.dropout:
        return AttentionPath.REMAPPED_CHUNKED, "the kernel does not drop weights"
    if key.requires_grad or key.mask_requires_grad:
        return AttentionPath.REMAPPED_CHUNKED, "the backward pass computes the weights again"
    if not key.on_cpu:
        return AttentionPath.REMAPPED_CHUNKED, "kernels of other devices return no log-sum-exp under a mask"
    return AttentionPath.REMAPPED_MERGED, "each key is in one part, so that parts merge exactly"
