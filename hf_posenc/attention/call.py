"""One attention to compute, in the form that every path takes it.

Shape legend: B batch, H heads, G key heads, Q queries, K keys, D head size.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import torch
from torch import nn

from ..schemes import Content, DistanceTable, Positions, Term
from .masks import AttentionMask

HEADS_PER_CHUNK = 4
"""Tuned on CPU: 1 underuses cores, 2 adds call overhead, more than 4 spills the cache."""
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
    """Score terms."""
    value_tables: list[DistanceTable]
    """Vectors per distance that are added to the values."""
    positions: Positions
    content: Content
    stock_kwargs: dict[str, Any]
    """Further arguments of the stock function."""

    @property
    def tensor_mask(self) -> torch.Tensor | None:
        """The mask of any backend but flex_attention."""
        assert self.attention_mask is None or isinstance(self.attention_mask, torch.Tensor)
        return self.attention_mask

    def run_stock(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None
    ) -> AttentionOutput:
        kwargs = {"scaling": self.scaling, "dropout": self.dropout, **self.stock_kwargs}
        return self.stock(self.module, query, key, value, mask, **kwargs)

    def requires_grad(self) -> bool:
        """Whether any input or term needs a gradient."""
        if not torch.is_grad_enabled():
            return False
        tensors = [self.query, self.key, self.value]
        for term in (*self.terms, *self.value_tables):
            tensors.extend(_tensors(term))
        return any(tensor.requires_grad for tensor in tensors)


def _tensors(term: Term | DistanceTable) -> Iterator[torch.Tensor]:
    if isinstance(term, torch.Tensor):
        yield term
    else:
        for field in dataclasses.fields(term):
            yield from _tensors(getattr(term, field.name))


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
