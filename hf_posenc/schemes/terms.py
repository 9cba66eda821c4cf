"""The forms that a score term can take. Each says what the term is a function of, so that the engine can do it cheaply.

Shape legend: B batch, H heads, Q queries, K keys, D width of a head, L = Q + K - 1 distances, R rows of a table.
"""

from __future__ import annotations

import dataclasses

import torch


@dataclasses.dataclass(frozen=True)
class DistanceBias:
    """Of head and distance only: one value a head for each of `Positions.distances`."""

    values: torch.Tensor
    """(H, L) where positions are uniform, else (H, B, Q, K)."""


@dataclasses.dataclass(frozen=True)
class DistanceTable:
    """A vector for each distance: rows of a table, and which of them belongs to each of `Positions.distances`."""

    rows_HRD: torch.Tensor
    """(H or 1, R, D)."""
    index: torch.Tensor
    """(L,) where positions are uniform, else (B, Q, K)."""


@dataclasses.dataclass(frozen=True)
class QueryTerm:
    """Of the query and the distance: the product of the query, before any rotation, and the distance's vector."""

    table: DistanceTable


@dataclasses.dataclass(frozen=True)
class KeyTerm:
    """Of the key and the distance: the product of the key, as it is cached, and the distance's vector."""

    table: DistanceTable


@dataclasses.dataclass(frozen=True)
class Separable:
    """A product of something of the query and something of the key: f(i) . g(j)."""

    queries: torch.Tensor
    """(B or 1, H or 1, Q, any width)."""
    keys: torch.Tensor
    """(B or 1, H or 1, K, the same width)."""


Term = DistanceBias | QueryTerm | KeyTerm | Separable | torch.Tensor
"""A tensor is a term of anything else, written out: (B or 1, H, Q or 1, K)."""
