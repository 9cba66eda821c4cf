"""Score terms as dense tensors, and the attention paths that use them: where they are small, or a kernel needs them.

Shape legend: B batch, H heads, Q queries, K keys, D head size, L = Q + K - 1 distances, R rows of a table.
"""

from __future__ import annotations

from functools import reduce

import torch
from torch import nn

from ..schemes import (
    Content,
    DistanceBias,
    DistanceTable,
    KeyTerm,
    Positions,
    QueryTerm,
    RunningSum,
    Separable,
    Term,
    is_tracing,
    repeat_key_heads,
)
from .bands import key_products_by_distance, products_by_distance
from .dispatch import AttentionCall, AttentionOutput, iter_head_slices, slice_heads
from .distance_mask import distance_mask
from .masks import apply_mask, narrow_bias


def dense_bias_attention(call: AttentionCall) -> AttentionOutput:
    """The stock function with a dense bias as its mask."""
    query, bias = call.query, _stock_bias(call)
    if bias.requires_grad and not any(states.requires_grad for states in (query, call.key, call.value)):
        # SDPA on CUDA may crash if nothing but the mask requires a gradient (pytorch issue 148476).
        query = query.detach().requires_grad_()
    return call.run_stock(query, call.key, call.value, bias)


def dense_bias_by_heads(call: AttentionCall) -> AttentionOutput:
    """The stock function for a few heads at a time, so that the bias is dense for these heads only."""
    outputs = []
    for heads, key_heads in iter_head_slices(call.query, call.key):
        query, key, value = call.query[:, heads], call.key[:, key_heads], call.value[:, key_heads]
        outputs.append(call.run_stock(query, key, value, _stock_bias(call, heads))[0])
    return torch.cat(outputs, dim=2), None


def dense_attention(call: AttentionCall) -> AttentionOutput:
    """Attention with explicit weights, for vectors that are added to the values.

    Weights of keys that share a table row are summed first: Q x R sums and one matmul, never a vector per pair.
    """
    query = call.query
    key, value = (repeat_key_heads(states, query.shape[1]) for states in (call.key, call.value))
    wide = torch.promote_types(query.dtype, torch.float32)  # the lowest float16 plus a negative logit would be -inf
    logits = (query * call.scaling).matmul(key.transpose(-1, -2)).to(wide) + dense_bias(call)
    weights = nn.functional.softmax(logits, dim=-1)
    weights = nn.functional.dropout(weights, p=call.dropout, training=call.module.training)
    output_BHQD = weights.to(query.dtype).matmul(value)
    for table in call.value_tables:  # sums of many small weights: in the wide dtype
        index = table_index_BQK(table, call.positions, query.shape[2])[..., : key.shape[2]].to(query.device)
        sums_BHQR = weights.new_zeros(*weights.shape[:-1], table.rows_HRD.shape[1])
        sums_BHQR = sums_BHQR.scatter_add(-1, index[:, None].expand_as(weights), weights)
        output_BHQD = output_BHQD + sums_BHQR.to(query.dtype).matmul(table.rows_HRD.to(query))
    return output_BHQD.transpose(1, 2).contiguous(), weights.to(query.dtype)


def dense_bias(call: AttentionCall, heads: slice | None = None, narrow_first: bool = False) -> torch.Tensor:
    """The sum of the terms as a mask for the stock function: the lowest finite number at hidden keys.

    With `narrow_first`, a sum that depends on the distance only is expanded in the dtype of the queries. Its backward
    pass cannot be differentiated again.
    """
    bias, mask, dtype = sum_terms(call, heads), call.tensor_mask, call.query.dtype
    if heads is not None and mask is not None:
        mask = slice_heads(mask, 1, heads)
    if bias.dim() == 2:
        num_queries, num_keys = call.query.shape[2], call.key.shape[2]
        if narrow_first and num_queries > 1 and (mask is None or mask.dtype == torch.bool):
            return distance_mask(bias, mask, call.causal, num_keys, dtype)
        bias = expand_distances(bias, num_queries, num_keys)
    return apply_mask(narrow_bias(bias, dtype), mask, call.causal)


def _stock_bias(call: AttentionCall, heads: slice | None = None) -> torch.Tensor:
    """The bias for the stock function. Compilers fuse what `narrow_first` does by hand."""
    return dense_bias(call, heads, narrow_first=call.positions.backend == "sdpa" and not is_tracing())


def sum_terms(call: AttentionCall, heads: slice | None = None) -> torch.Tensor:
    """The sum of the terms: (H, L) if all depend on the distance only, else (B or 1, H, Q, K)."""
    terms, positions, content = call.terms, call.positions, call.content
    if heads is not None:
        terms, content = [_slice_term(term, heads) for term in terms], content.of_heads(heads)
    query_BHQD = content.query_BHQD
    by_distance = [term.values.to(query_BHQD.device) for term in terms if isinstance(term, DistanceBias)]
    if not terms:
        total = query_BHQD.new_zeros(1, 1, query_BHQD.shape[2], positions.key_length)
    elif positions.uniform and len(by_distance) == len(terms):
        total = reduce(torch.add, by_distance)
    else:
        total = reduce(torch.add, [materialize(term, positions, content) for term in terms])
        total = total.expand(-1, -1, query_BHQD.shape[2], positions.key_length)
    return total[..., : total.shape[-1] - positions.key_length + call.key.shape[2]]


def _slice_term(term: Term, heads: slice) -> Term:
    if isinstance(term, DistanceBias):
        return DistanceBias(slice_heads(term.values, 0, heads))
    if isinstance(term, (QueryTerm, KeyTerm)):
        return type(term)(DistanceTable(slice_heads(term.table.rows_HRD, 0, heads), term.table.index))
    if isinstance(term, Separable):
        return Separable(slice_heads(term.queries, 1, heads), slice_heads(term.keys, 1, heads))
    if isinstance(term, RunningSum):
        return RunningSum(slice_heads(term.queries, 1, heads), slice_heads(term.keys, 1, heads))
    return slice_heads(term, 1, heads)


def materialize(term: Term, positions: Positions, content: Content) -> torch.Tensor:
    """Compute a score term as a dense tensor.

    Args:
        term: The term, as a scheme's `score` returns it.
        positions: The positions it was built for.
        content: The queries and keys of the layer.

    Returns:
        What the term adds to the scaled logits: (B or 1, H, Q or 1, K).
    """
    query_BHQD = content.query_BHQD
    device = query_BHQD.device
    if isinstance(term, DistanceBias):
        values = term.values.to(device)
        if not positions.uniform:
            return values.transpose(0, 1)
        return expand_distances(values, query_BHQD.shape[2], positions.key_length)
    if isinstance(term, (QueryTerm, KeyTerm)):
        # While tracing, a strided view of a symbolic length would fix the length.
        multiply = _products_by_band if positions.uniform and not is_tracing() else _products_by_lookup
        return multiply(term, positions, content).to(positions.dtype)
    if isinstance(term, Separable):
        return term.queries.to(device).matmul(term.keys.to(device).transpose(-1, -2))
    if isinstance(term, RunningSum):
        queries, keys = term.relative(positions.dtype)
        return queries[..., None] - keys[..., None, :]
    return term.to(device)


def _products_by_band(term: QueryTerm | KeyTerm, positions: Positions, content: Content) -> torch.Tensor:
    query_BHQD = content.query_BHQD
    rows_HLD = term.table.rows_HRD.to(query_BHQD)[:, term.table.index.to(query_BHQD.device)]
    if isinstance(term, QueryTerm):
        return products_by_distance(query_BHQD, rows_HLD, positions.key_length)
    return key_products_by_distance(content.key_BHKD, rows_HLD, query_BHQD.shape[2])


def _products_by_lookup(term: QueryTerm | KeyTerm, positions: Positions, content: Content) -> torch.Tensor:
    batch, heads, num_queries, _ = content.query_BHQD.shape
    index_BHQK = table_index_BQK(term.table, positions, num_queries).to(content.query_BHQD.device)[:, None]
    index_BHQK = index_BHQK.expand(batch, heads, -1, -1)
    # All far keys share a row, whose gradient is a long sum: widen before the lookup.
    products = row_products(term, content).to(positions.dtype)
    if isinstance(term, QueryTerm):
        return products.gather(-1, index_BHQK)
    return products.gather(-1, index_BHQK.transpose(-1, -2)).transpose(-1, -2)


def row_products(term: QueryTerm | KeyTerm, content: Content) -> torch.Tensor:
    """(B, H, Q or K, R): the product of each query or key with each row of the table."""
    states = content.query_BHQD if isinstance(term, QueryTerm) else content.key_BHKD
    return states.matmul(term.table.rows_HRD.to(states).transpose(-1, -2))


def table_index_BQK(table: DistanceTable, positions: Positions, num_queries: int) -> torch.Tensor:
    """(B or 1, Q, K): the table row of each pair of query and key."""
    if not positions.uniform:
        return table.index
    return expand_distances(table.index[None], num_queries, positions.key_length)[0]


def expand_distances(values_HL: torch.Tensor, num_queries: int, num_keys: int) -> torch.Tensor:
    """(1, H, Q, K): values per distance, for each pair of query and key."""
    if num_queries == 1:
        return values_HL[None, :, None]
    if is_tracing():  # a strided view of a symbolic length would fix the length
        keys, queries = (torch.arange(length, device=values_HL.device) for length in (num_keys, num_queries))
        return values_HL[:, keys - queries[:, None] + num_queries - 1][None]
    return strided_bias(values_HL, num_keys).flip(-2)[None]


def strided_bias(values_HL: torch.Tensor, num_keys: int) -> torch.Tensor:
    """(H, Q, K), queries reversed: a view of each head's vector, without a copy."""
    return values_HL.unfold(-1, num_keys, 1)
