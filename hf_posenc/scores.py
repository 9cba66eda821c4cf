"""From score terms to what is added to the logits: by distance where that says it all, else written out.

Shape legend: B batch, H heads, Q queries, K keys, D width of a head, L = Q + K - 1 distances, R rows of a table.
"""

from __future__ import annotations

from functools import reduce

import torch

from .scheme import Content, Positions, tracing
from .terms import DistanceBias, DistanceRows, KeyTerm, QueryTerm, Separable, Term


def added_up(terms: list[Term], posenc: Positions, content: Content) -> torch.Tensor:
    """The sum of all terms: (H, L) by distance if that says it all, else (B or 1, H, Q, K)."""
    if posenc.uniform and all(isinstance(term, DistanceBias) for term in terms):
        return reduce(torch.add, [term.values.to(content.query_BHQD.device) for term in terms])  # type: ignore
    whole = reduce(torch.add, [written_out(term, posenc, content) for term in terms])
    return whole.expand(-1, -1, content.query_BHQD.shape[2], -1)


def written_out(term: Term, posenc: Positions, content: Content) -> torch.Tensor:
    """One term as a tensor, (B or 1, H, Q or 1, K)."""
    query_BHQD = content.query_BHQD
    device = query_BHQD.device
    if isinstance(term, DistanceBias):
        values = term.values.to(device)
        return by_slots(values, query_BHQD.shape[2], posenc.key_length) if posenc.uniform else values.transpose(0, 1)
    if isinstance(term, QueryTerm):
        by_row_BHQR = query_BHQD.matmul(_across(term.of, query_BHQD))
        return by_row_BHQR.to(posenc.dtype).gather(-1, _indices(term.of, posenc, query_BHQD))
    if isinstance(term, KeyTerm):
        by_row_BHKR = content.key_BHKD.matmul(_across(term.of, query_BHQD))
        by_row_BHKR = by_row_BHKR.to(posenc.dtype)  # all far keys share a row: its gradient is a long sum
        return by_row_BHKR.gather(-1, _indices(term.of, posenc, query_BHQD).transpose(-1, -2)).transpose(-1, -2)
    if isinstance(term, Separable):
        return term.queries.to(device).matmul(term.keys.to(device).transpose(-1, -2))
    return term.to(device)


def _across(rows: DistanceRows, like: torch.Tensor) -> torch.Tensor:
    return rows.rows_HRD.to(like).transpose(-1, -2)


def _indices(rows: DistanceRows, posenc: Positions, query_BHQD: torch.Tensor) -> torch.Tensor:
    """(B, H, Q, K): the row of each pair of query and key; heads are a view."""
    batch, heads, num_queries, _ = query_BHQD.shape
    return indices_BQK(rows, posenc, num_queries).to(query_BHQD.device)[:, None].expand(batch, heads, -1, -1)


def indices_BQK(rows: DistanceRows, posenc: Positions, num_queries: int) -> torch.Tensor:
    """(B or 1, Q, K): the row of each pair of query and key."""
    return by_slots(rows.index[None], num_queries, posenc.key_length)[0] if posenc.uniform else rows.index


def by_slots(values_HL: torch.Tensor, num_queries: int, num_keys: int) -> torch.Tensor:
    """(1, H, Q, K) of the values by distance."""
    if tracing():  # a view of a symbolic length would fix the length
        keys, queries = (torch.arange(length, device=values_HL.device) for length in (num_keys, num_queries))
        return values_HL[:, keys - queries[:, None] + num_queries - 1][None]
    return rows_by_falling_query(values_HL, num_keys).flip(-2)[None]


def rows_by_falling_query(values_HL: torch.Tensor, num_keys: int) -> torch.Tensor:
    """(H, Q, K), last query first: a view of the one vector of each head, not a copy."""
    return values_HL.unfold(-1, num_keys, 1)
