"""flex_attention with a score_mod that reads vectors and tables, so that no term needs a Q x K tensor.

A term of the query or key and the distance becomes its products with the rows of its table, Q x R. A separable term is
concatenated to queries and keys, unless it is very wide. Any other term is passed as a dense tensor, and so are terms
of the distance if position_ids have gaps.

Functions that are compiled capture tensors only: a number would be compiled into the kernel.

Shape legend: B batch, H heads, G key heads, Q queries, K keys, D head size, L = Q + K - 1 distances, R rows of a table.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
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
    is_tracing,
    repeat_key_heads,
)
from .block_masks import block_mask_from_tensor, causal_block_mask
from .compiled_flex import compiled_flex_attention, compiles_flex
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
    if kwargs.get("kernel_options") is None:
        kwargs["kernel_options"] = kernel_options(terms, call.query.device)
    return run_flex_attention(
        call.module, call.query, call.key, call.value, _flex_mask(call), score_terms, separable, **kwargs
    )


def kernel_options(terms: Sequence[Term], device: torch.device) -> dict[str, Any] | None:
    """More warps for the backward pass of content terms on GPUs before the H100, where it would spill registers.

    That is what ptxas reports for the kernels of `deberta` and `tupe` at the shape of LLaMA-8B.
    """
    has_content = any(isinstance(term, (QueryTerm, KeyTerm, Separable)) for term in terms)
    if device.type != "cuda" or not has_content or torch.cuda.get_device_capability(device) >= (9, 0):
        return None
    return {"bwd_num_warps": 8}


def _flex_mask(call: AttentionCall) -> AttentionMask:
    """The mask as a block mask where it can be one. All layers share what is made of it."""
    mask, made = call.attention_mask, call.positions.block_masks
    is_boolean = isinstance(mask, torch.Tensor) and mask.dtype == torch.bool
    if is_tracing() or not (call.causal if mask is None else is_boolean):
        return mask
    num_queries, num_keys = call.query.shape[2], call.key.shape[2]
    key = (id(mask), num_queries, num_keys, call.query.device)
    if key not in made:
        if isinstance(mask, torch.Tensor):
            visible = mask[..., :num_keys].expand(-1, -1, num_queries, -1)
            made[key] = mask, block_mask_from_tensor(visible, call.query.shape[0])  # keeping the mask keeps its id
        else:
            made[key] = mask, causal_block_mask(num_queries, call.query.device)
    block_mask: AttentionMask = made[key][1]
    return block_mask


def make_score_term(term: Term, positions: Positions, content: Content) -> ScoreTerm:
    """A term as a lookup in tensors that score_mod may capture."""
    query = content.query_BHQD
    (batch_size, num_heads, num_queries, _), device = query.shape, query.device
    last = torch.full((), num_queries - 1, device=device)
    if isinstance(term, DistanceBias):
        values = term.values.to(device)
        if positions.uniform:
            values = values.expand(num_heads, -1)
            return lambda batch, head, q, k: values[head, k - q + last]
        values = values.expand(num_heads, batch_size, -1, -1)
        return lambda batch, head, q, k: values[head, batch, q, k]
    if isinstance(term, (QueryTerm, KeyTerm)):
        index, products = term.table.index.to(device), row_products(term, content)
        if positions.uniform:
            if isinstance(term, QueryTerm):
                return lambda batch, head, q, k: products[batch, head, q, index[k - q + last]]
            return lambda batch, head, q, k: products[batch, head, k, index[k - q + last]]
        index = index.expand(batch_size, -1, -1)
        if isinstance(term, QueryTerm):
            return lambda batch, head, q, k: products[batch, head, q, index[batch, q, k]]
        return lambda batch, head, q, k: products[batch, head, k, index[batch, q, k]]
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

    options: dict[str, Any] = {
        "score_mod": score_mod if score_terms or additive_mask is not None else None,
        "block_mask": block_mask,
        "enable_gqa": query.shape[1] != key.shape[1],
        "scale": scaling,
        "kernel_options": kwargs.get("kernel_options"),
    }
    if is_tracing() or not compiles_flex(query):
        output_BHQD = flex_attention(query, key, value, **options)
    else:
        kind = _kind(score_terms, block_mask, additive_mask)
        output_BHQD = compiled_flex_attention(kind, query, key, value, **options)
    assert isinstance(output_BHQD, torch.Tensor)
    return output_BHQD.transpose(1, 2).contiguous(), None


def _kind(score_terms: Sequence[ScoreTerm], block_mask: Any, additive_mask: torch.Tensor | None) -> Hashable:
    """What the code of score_mod and mask_mod depends on: the functions that they are made of."""
    mask_mod = getattr(block_mask, "mask_mod", None)
    return (*(term.__code__ for term in score_terms), getattr(mask_mod, "__code__", None), additive_mask is None)
