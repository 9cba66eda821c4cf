"""From score terms to what is added to the logits: by distance where that says it all, else written out.

Shape legend: B batch, H heads, Q queries, K keys, D width of a head, L = Q + K - 1 distances, R rows of a table.
"""

from __future__ import annotations

from functools import reduce
from typing import Any

import torch

from ..schemes.inputs import Content, Positions, is_tracing
from ..schemes.terms import DistanceBias, DistanceTable, KeyTerm, QueryTerm, Separable, Term
from .bands import products_by_distance, products_of_keys_by_distance


def sum_terms(terms: list[Term], posenc: Positions, content: Content) -> torch.Tensor:
    """The sum of all terms: (H, L) by distance if that says it all, else (B or 1, H, Q, K)."""
    if not terms:
        return content.query_BHQD.new_zeros(1, 1, content.query_BHQD.shape[2], posenc.key_length)
    if posenc.uniform and all(isinstance(term, DistanceBias) for term in terms):
        return reduce(torch.add, [term.values.to(content.query_BHQD.device) for term in terms])  # type: ignore
    return reduce(torch.add, [materialize(term, posenc, content) for term in terms]).expand(
        -1, -1, content.query_BHQD.shape[2], posenc.key_length
    )


def _banded(posenc: Positions) -> bool:
    return posenc.uniform and not is_tracing()  # a view of a symbolic length would fix the length


def slice_term_heads(term: Term, heads: slice) -> Term:
    """A term of some of the heads only."""
    if isinstance(term, DistanceBias):
        return DistanceBias(slice_heads(term.values, 0, heads))
    if isinstance(term, (QueryTerm, KeyTerm)):
        return type(term)(DistanceTable(slice_heads(term.table.rows_HRD, 0, heads), term.table.index))
    if isinstance(term, Separable):
        return Separable(slice_heads(term.queries, 1, heads), slice_heads(term.keys, 1, heads))
    return slice_heads(term, 1, heads)


def slice_heads(tensor: torch.Tensor, axis: int, heads: slice) -> torch.Tensor:
    """A view of some heads; what all heads share has one, and stays."""
    return tensor if tensor.shape[axis] == 1 else tensor.narrow(axis, heads.start, heads.stop - heads.start)


def materialize(term: Term, posenc: Positions, content: Content) -> torch.Tensor:
    """One term as a tensor, (B or 1, H, Q or 1, K)."""
    query_BHQD = content.query_BHQD
    device = query_BHQD.device
    if isinstance(term, DistanceBias):
        values = term.values.to(device)
        return (
            expand_distances(values, query_BHQD.shape[2], posenc.key_length)
            if posenc.uniform
            else values.transpose(0, 1)
        )
    if isinstance(term, (QueryTerm, KeyTerm)):
        return (_by_bands if _banded(posenc) else _by_lookup)(term, posenc, content).to(posenc.dtype)
    if isinstance(term, Separable):
        return term.queries.to(device).matmul(term.keys.to(device).transpose(-1, -2))
    return term.to(device)


def _rows_by_distance(term: Any, content: Content) -> torch.Tensor:
    """(H or 1, L, D): the table written out for every distance that occurs."""
    return term.table.rows_HRD.to(content.query_BHQD)[:, term.table.index.to(content.query_BHQD.device)]


def _by_bands(term: QueryTerm | KeyTerm, posenc: Positions, content: Content) -> torch.Tensor:
    query_BHQD, rows_HLD = content.query_BHQD, _rows_by_distance(term, content)
    if isinstance(term, QueryTerm):
        return products_by_distance(query_BHQD, rows_HLD, posenc.key_length)
    return products_of_keys_by_distance(content.key_BHKD, rows_HLD, query_BHQD.shape[2])


def _by_lookup(term: QueryTerm | KeyTerm, posenc: Positions, content: Content) -> torch.Tensor:
    """The general way: products with all rows, and then each pair's own."""
    batch, heads, num_queries, _ = content.query_BHQD.shape
    indices_BHQK = indices_BQK(term.table, posenc, num_queries).to(content.query_BHQD.device)[:, None]
    indices_BHQK = indices_BHQK.expand(batch, heads, -1, -1)
    # All far keys share a row, whose gradient is a long sum: wide before it is looked up.
    if isinstance(term, QueryTerm):
        return query_row_products(term, content).to(posenc.dtype).gather(-1, indices_BHQK)
    by_row_BHKR = key_row_products(term, content).to(posenc.dtype)
    return by_row_BHKR.gather(-1, indices_BHQK.transpose(-1, -2)).transpose(-1, -2)


def query_row_products(term: QueryTerm, content: Content) -> torch.Tensor:
    """(B, H, Q, R): the product of each query with each row of the table."""
    return content.query_BHQD.matmul(term.table.rows_HRD.to(content.query_BHQD).transpose(-1, -2))


def key_row_products(term: KeyTerm, content: Content) -> torch.Tensor:
    """(B, H, K, R): the product of each key with each row of the table."""
    return content.key_BHKD.matmul(term.table.rows_HRD.to(content.key_BHKD).transpose(-1, -2))


def indices_BQK(rows: DistanceTable, posenc: Positions, num_queries: int) -> torch.Tensor:
    """(B or 1, Q, K): the row of each pair of query and key."""
    return expand_distances(rows.index[None], num_queries, posenc.key_length)[0] if posenc.uniform else rows.index


def expand_distances(values_HL: torch.Tensor, num_queries: int, num_keys: int) -> torch.Tensor:
    """(1, H, Q, K) of the values by distance."""
    if num_queries == 1:
        return values_HL[None, :, None]
    if is_tracing():  # a view of a symbolic length would fix the length
        keys, queries = (torch.arange(length, device=values_HL.device) for length in (num_keys, num_queries))
        return values_HL[:, keys - queries[:, None] + num_queries - 1][None]
    return strided_bias(values_HL, num_keys).flip(-2)[None]


def strided_bias(values_HL: torch.Tensor, num_keys: int) -> torch.Tensor:
    """(H, Q, K), last query first: a view of the one vector of each head, not a copy."""
    return values_HL.unfold(-1, num_keys, 1)
