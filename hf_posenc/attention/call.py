"""One attention that is to be computed, as every way of computing it is handed it.

Shape legend: B batch, H heads, G heads of keys, Q queries, K keys, D width of a head, L = Q + K - 1 distances.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from ..schemes.inputs import Content, Positions
from ..schemes.terms import DistanceTable, Term
from .masks import apply_mask
from .materialize import expand_distances, slice_heads, slice_term_heads, sum_terms


@dataclasses.dataclass(frozen=True)
class AttentionCall:
    """What one layer's attention is called with, and what its schemes want added."""

    module: Any
    stock: Callable[..., Any]
    """The stock function of the backend that the model is set to."""
    query: torch.Tensor
    """(B, H, Q, D), turned, and scaled where a scheme scales the content."""
    key: torch.Tensor
    """(B, G, K, D). Slots of a static cache that a first call leaves empty are cut off where queries see none ahead."""
    value: torch.Tensor
    attention_mask: Any
    causal: bool
    """Whether queries see no key ahead, and there is no mask to say so."""
    scaling: float
    dropout: float
    terms: list[Term]
    """Of the scores."""
    value_rows: list[DistanceTable]
    """Vectors that join the values."""
    positions: Positions
    content: Content
    extra: dict[str, Any]
    """What else the stock function was to be told."""

    def run_stock(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any) -> Any:
        settings = {"scaling": self.scaling, "dropout": self.dropout, **self.extra}
        return self.stock(self.module, query, key, value, mask, **settings)

    def wants_gradient(self) -> bool:
        """Whether anything that is multiplied here is to get a gradient."""
        if not torch.is_grad_enabled():
            return False
        mine = [self.query, self.key, self.value, *tensors_of(self.terms), *tensors_of(self.value_rows)]
        return any(tensor.requires_grad for tensor in mine)

    def summed(self, heads: slice | None = None) -> torch.Tensor:
        """The sum of the terms, (H, L) by distance or (B or 1, H, Q, K), of all heads or some."""
        terms = self.terms if heads is None else [slice_term_heads(term, heads) for term in self.terms]
        content = self.content if heads is None else self.content.of_heads(heads)
        values = sum_terms(terms, self.positions, content)
        return values[..., : values.shape[-1] - self.positions.key_length + self.key.shape[2]]

    def bias(self, heads: slice | None = None) -> torch.Tensor:
        """The sum written out, with the lowest number where there is nothing to see: a mask for the stock function."""
        values = self.summed(heads)
        bias = expand_distances(values, self.query.shape[2], self.key.shape[2]) if values.dim() == 2 else values
        mask = self.attention_mask
        if heads is not None and mask is not None:
            mask = slice_heads(mask, 1, heads)
        return apply_mask(bias.to(self.query.dtype), mask, self.causal)


def tensors_of(terms: Any) -> list[torch.Tensor]:
    """All tensors in some terms, or in vectors that join the values."""
    found: list[torch.Tensor] = []
    for term in terms:
        if isinstance(term, torch.Tensor):
            found.append(term)
        else:
            found.extend(tensors_of([getattr(term, field.name) for field in dataclasses.fields(term)]))
    return found
