"""flex_attention with a score_mod that reads vectors and tables, so that no term needs a Q x K tensor.

A term of the query or key and the distance becomes its products with the rows of its table, Q x R. A separable term is
concatenated to queries and keys, unless it is very wide. Any other term is passed as a dense tensor, and so are terms
of the distance with gaps or packed rows.

Shape legend: B batch, H heads, G key heads, Q queries, K keys, D head size, L = Q + K - 1 distances, R rows of a table.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import nn

from ..errors import PosEncError
from ..schemes import (
    Content,
    DistanceBias,
    KeyTerm,
    Positions,
    QueryTerm,
    RunningSum,
    Separable,
    Term,
    repeat_key_heads,
)
from .dense import materialize, row_products, sum_terms
from .dispatch import FLEX_DROPOUT_ERROR, AttentionCall, AttentionOutput
from .masks import AttentionMask

MAX_CONCATENATED = 256
"""Wider separable terms would exceed the kernels' shared memory."""
ScoreTerm: TypeAlias = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""What a term adds, given indices of batch, head, query and key."""


def flex_attention_with_terms(call: AttentionCall) -> AttentionOutput:
    """flex_attention under score terms of any kind."""
    terms = call.terms
    if call.positions.uniform and all(isinstance(term, DistanceBias) for term in terms):
        terms = [DistanceBias(sum_terms(call))]
    separable: list[Separable] = []
    score_terms: list[ScoreTerm] = []
    for term in terms:
        if isinstance(term, Separable) and term.keys.shape[-1] <= MAX_CONCATENATED:
            separable.append(term)
        else:
            score_terms.append(make_score_term(term, call.positions, call.content))
    kwargs = {"scaling": call.scaling, "dropout": call.dropout, **call.stock_kwargs}
    return run_flex_attention(
        call.module, call.query, call.key, call.value, call.attention_mask, score_terms, separable, **kwargs
    )


def make_score_term(term: Term, positions: Positions, content: Content) -> ScoreTerm:
    """A term as a lookup in tensors that score_mod may capture."""
    query = content.query_BHQD
    (batch_size, num_heads, num_queries, _), device = query.shape, query.device
    last = num_queries - 1
    if isinstance(term, DistanceBias):
        values = term.values.to(device)
        if positions.uniform:
            return lambda batch, head, q, k: values[head, k - q + last]
        values = values.expand(num_heads, batch_size, -1, -1)
        return lambda batch, head, q, k: values[head, batch, q, k]
    if isinstance(term, (QueryTerm, KeyTerm)):
        index = term.table.index.to(device)
        if not positions.uniform:
            index = index.expand(batch_size, -1, -1)
        products, is_query_term = row_products(term, content), isinstance(term, QueryTerm)

        def look_up(batch: torch.Tensor, head: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
            row = index[k - q + last] if positions.uniform else index[batch, q, k]
            return products[batch, head, q if is_query_term else k, row]

        return look_up
    if isinstance(term, RunningSum):
        queries, keys = term.relative(positions.dtype)
        return lambda batch, head, q, k: queries[batch, head, q] - keys[batch, head, k]
    dense = materialize(term, positions, content).expand(batch_size, num_heads, num_queries, -1)
    return lambda batch, head, q, k: dense[batch, head, q, k]


def concat_separable(
    query: torch.Tensor, key: torch.Tensor, terms: Sequence[Separable], scaling: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries and keys with the factors of separable terms concatenated: their product is the sum of both."""
    queries, keys = [query], [repeat_key_heads(key, query.shape[1])]
    for term in terms:
        queries.append((term.queries.to(query) / scaling).expand(*query.shape[:3], -1))
        keys.append(term.keys.to(key)[:, :, : key.shape[2]].expand(*keys[0].shape[:3], -1))
    return torch.cat(queries, dim=-1), torch.cat(keys, dim=-1)


def run_flex_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: AttentionMask,
    score_terms: Sequence[ScoreTerm] = (),
    separable: Sequence[Separable] = (),
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> AttentionOutput:
    """Call flex_attention with a score_mod that adds the terms, and a mask that may be a tensor."""
    from torch.nn.attention.flex_attention import BlockMask, flex_attention
    from transformers.integrations.flex_attention import compile_friendly_flex_attention

    if dropout > 0:
        raise PosEncError(FLEX_DROPOUT_ERROR)
    block_mask, additive_mask = None, None
    if isinstance(attention_mask, BlockMask):
        block_mask = attention_mask
    elif attention_mask is not None:
        if attention_mask.dtype == torch.bool:
            lowest = torch.finfo(query.dtype).min
            attention_mask = torch.where(attention_mask, 0.0, lowest).to(query.dtype)
        additive_mask = attention_mask.expand(*query.shape[:3], -1)
    if separable:
        scaling = scaling or query.shape[-1] ** -0.5
        query, key = concat_separable(query, key, separable, scaling)
        value = repeat_key_heads(value, key.shape[1])

    def score_mod(
        score: torch.Tensor, batch: torch.Tensor, head: torch.Tensor, q: torch.Tensor, k: torch.Tensor
    ) -> torch.Tensor:
        for score_term in score_terms:
            score = score + score_term(batch, head, q, k).to(score.dtype)
        return score if additive_mask is None else score + additive_mask[batch, head, q, k]

    on_cpu = query.device.type == "cpu"  # torch 2.13's CPU kernels fail to compile if lengths change between calls
    attend = flex_attention if on_cpu else partial(compile_friendly_flex_attention, training=module.training)
    output_BHQD = attend(
        query,
        key,
        value,
        score_mod=score_mod if score_terms or additive_mask is not None else None,
        block_mask=block_mask,
        enable_gqa=query.shape[1] != key.shape[1],
        scale=scaling,
        kernel_options=kwargs.get("kernel_options"),
    )
    assert isinstance(output_BHQD, torch.Tensor)
    return output_BHQD.transpose(1, 2).contiguous(), None
