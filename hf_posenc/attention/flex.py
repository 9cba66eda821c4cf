"""flex_attention with a score_mod over vectors and tables, so that nothing of queries x keys is written out for them.

A term of the query or the key and the distance becomes products with the rows of its table, queries x rows; a product
of something of the query and something of the key is folded into both, unless it is very wide. What is of neither form
is written out, and so is what is by distance where distances are not by slot (gaps, documents).

Shape legend: B batch, H heads, G heads of keys, Q queries, K keys, D width of a head, L = Q + K - 1 distances,
R rows of a table.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from ..schemes.inputs import Content, Positions
from ..schemes.terms import DistanceBias, KeyTerm, QueryTerm, Separable, Term
from .call import AttentionCall
from .dispatch import FLEX_DROPOUT_ERROR
from .materialize import key_row_products, materialize, query_row_products

WIDEST_FOLDED = 256
"""Beyond it, queries and keys would outgrow the kernels' memory."""
Lookup = Callable[[Any, Any, Any, Any], Any]
"""What a term adds, of row of the batch, head, query and key."""


def flex_attention_with_terms(call: AttentionCall) -> tuple[torch.Tensor, None]:
    """Attention under score terms of any form."""
    if all(isinstance(term, DistanceBias) for term in call.terms) and call.positions.uniform:
        terms: list[Term] = [DistanceBias(call.summed())]
    else:
        terms = call.terms
    separable: list[Separable] = []
    lookups: list[Lookup] = []
    for term in terms:
        if isinstance(term, Separable) and term.keys.shape[-1] <= WIDEST_FOLDED:
            separable.append(term)
        else:
            lookups.append(lookup_of(term, call.positions, call.content))
    given = {"scaling": call.scaling, "dropout": call.dropout, **call.extra}
    return run_flex_attention(
        call.module, call.query, call.key, call.value, call.attention_mask, lookups, separable, **given
    )


def lookup_of(term: Term, positions: Positions, content: Content) -> Lookup:
    """A term as something to look up in tensors that score_mod may capture."""
    query = content.query_BHQD
    (batch, heads, num_queries, _), device = query.shape, query.device
    last = num_queries - 1
    if isinstance(term, DistanceBias):
        values = term.values.to(device)
        if positions.uniform:
            return lambda row, head, q, k: values[head, k - q + last]
        values = values.expand(heads, batch, -1, -1)
        return lambda row, head, q, k: values[head, row, q, k]
    if isinstance(term, (QueryTerm, KeyTerm)):
        index = term.table.index.to(device)
        if not positions.uniform:
            index = index.expand(batch, -1, -1)
        own = query_row_products(term, content) if isinstance(term, QueryTerm) else key_row_products(term, content)

        def of_rows(row: Any, head: Any, q: Any, k: Any) -> Any:
            place = index[k - q + last] if positions.uniform else index[row, q, k]
            return own[row, head, q if isinstance(term, QueryTerm) else k, place]

        return of_rows
    whole = materialize(term, positions, content).expand(batch, heads, num_queries, -1)
    return lambda row, head, q, k: whole[row, head, q, k]


def folded(
    query: torch.Tensor, key: torch.Tensor, terms: list[Separable], scaling: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries and keys with the factors of separable terms beside them: their product is the sum of both."""
    shared, queries, keys = query.shape[1] // key.shape[1], [query], [key]
    if shared > 1:
        keys = [key.repeat_interleave(shared, dim=1)]
    for term in terms:
        of_queries, of_keys = term.queries.to(query) / scaling, term.keys.to(key)[:, :, : key.shape[2]]
        queries.append(of_queries.expand(*query.shape[:3], -1))
        keys.append(of_keys.expand(*keys[0].shape[:3], -1))
    return torch.cat(queries, dim=-1), torch.cat(keys, dim=-1)


def run_flex_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    lookups: list[Lookup],
    separable: list[Separable],
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """flex_attention with a score_mod that reads the terms, and a mask that may be a plain tensor."""
    from torch.nn.attention.flex_attention import BlockMask, flex_attention
    from transformers.integrations.flex_attention import compile_friendly_flex_attention

    if dropout > 0:
        raise ValueError(FLEX_DROPOUT_ERROR)
    block_mask = attention_mask if isinstance(attention_mask, BlockMask) else None
    added = None if block_mask is not None else attention_mask
    if added is not None and added.dtype == torch.bool:
        added = torch.where(added, 0.0, torch.finfo(query.dtype).min).to(query.dtype)
    if added is not None:
        added = added.expand(*query.shape[:3], -1)
    if separable:
        scaling = scaling or query.shape[-1] ** -0.5
        query, key = folded(query, key, separable, scaling)
        if value.shape[1] != key.shape[1]:
            value = value.repeat_interleave(key.shape[1] // value.shape[1], dim=1)

    def score_mod(score: Any, row: Any, head: Any, q: Any, k: Any) -> Any:
        for lookup in lookups:
            score = score + lookup(row, head, q, k).to(score.dtype)
        return score if added is None else score + added[row, head, q, k]

    on_cpu = query.device.type == "cpu"  # torch 2.13's CPU kernels fail to compile where lengths change between calls
    output_BHQD = (flex_attention if on_cpu else partial(compile_friendly_flex_attention, training=module.training))(
        query,
        key,
        value,
        score_mod=score_mod if lookups or added is not None else None,
        block_mask=block_mask,
        enable_gqa=query.shape[1] != key.shape[1],
        scale=scaling,
        kernel_options=kwargs.get("kernel_options"),
    )
    return output_BHQD.transpose(1, 2).contiguous(), None
