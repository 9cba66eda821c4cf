"""Attention with something added to its logits, one function for each way of computing it.

Shape legend: B batch, H heads, Q queries, K keys, D width of a head, L = Q + K - 1 distances, R rows of a table.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from .scheme import tracing

HEADS_AT_A_TIME = 2
"""Measured: one leaves cores idle, four leave the caches."""


def by_heads_pays(*tensors: torch.Tensor) -> bool:
    """On a CPU the bias of one head fits a cache where those of all do not. Gradients would keep them all anyway."""
    query = tensors[0]
    wanted = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
    return query.device.type == "cpu" and query.shape[2] > 1 and not tracing() and not wanted


def sdpa_by_heads(
    stock: Callable[..., Any],
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bias_of: Callable[[slice], torch.Tensor],
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """SDPA for one head after the other, or a group of heads that share a key, with no more of the bias than theirs."""
    shared, num_groups = query.shape[1] // key.shape[1], key.shape[1]
    step = max(HEADS_AT_A_TIME // shared, 1)
    outputs = []
    for first in range(0, num_groups, step):
        own = slice(first, min(first + step, num_groups))
        heads = slice(own.start * shared, own.stop * shared)
        output, _ = stock(module, query[:, heads], key[:, own], value[:, own], bias_of(heads), **kwargs)
        outputs.append(output)
    return torch.cat(outputs, dim=2), None


def flex(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    values: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """flex_attention with a score_mod that reads the values, and a mask that may be a plain tensor."""
    from torch.nn.attention.flex_attention import BlockMask, flex_attention
    from transformers.integrations.flex_attention import compile_friendly_flex_attention

    if dropout > 0:
        raise ValueError(
            "flex_attention has no dropout: call model.eval(), set the attention dropout to 0, or use "
            'attn_implementation="sdpa"'
        )
    block_mask = attention_mask if isinstance(attention_mask, BlockMask) else None
    added = None if block_mask is not None else attention_mask
    if added is not None and added.dtype == torch.bool:
        added = torch.where(added, 0.0, torch.finfo(query.dtype).min).to(query.dtype)
    last_query, by_distance = query.shape[2] - 1, values is not None and values.dim() == 2
    if values is not None:
        values = values.to(query.dtype)
        values = values if by_distance else values.expand(query.shape[0], -1, -1, -1)

    def score_mod(score: Any, row: Any, head: Any, q: Any, k: Any) -> Any:
        if values is not None:
            score = score + (values[head, k - q + last_query] if by_distance else values[row, head, q, k])
        return score if added is None else score + added[row, 0, q, k]

    on_cpu = query.device.type == "cpu"  # torch 2.13's CPU kernels fail to compile where lengths change between calls
    output_BHQD = (flex_attention if on_cpu else partial(compile_friendly_flex_attention, training=module.training))(
        query,
        key,
        value,
        score_mod=None if values is None and added is None else score_mod,
        block_mask=block_mask,
        enable_gqa=query.shape[1] != key.shape[1],
        scale=scaling,
        kernel_options=kwargs.get("kernel_options"),
    )
    return output_BHQD.transpose(1, 2).contiguous(), None


def weighted(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bias: torch.Tensor,
    extra: list[tuple[torch.Tensor, torch.Tensor]],
    scaling: float,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention with its weights in hand, for terms that join the values: rows (H or 1, R, D), indices (B or 1, Q, K).

    The weights that a query gives to keys of the same row are summed first, so that it is Q x R sums and one product,
    never a vector for each pair.
    """
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    wide = torch.promote_types(query.dtype, torch.float32)  # the lowest float16 and a logit would be -inf together
    logits = (query * scaling).matmul(key.transpose(-1, -2)).to(wide) + bias
    weights = nn.functional.softmax(logits, dim=-1)
    weights = nn.functional.dropout(weights, p=dropout, training=module.training)
    output_BHQD = weights.to(query.dtype).matmul(value)
    for rows_HRD, indices_BQK in extra:  # sums of many small weights: in the wide dtype
        by_row_BHQR = weights.new_zeros(*weights.shape[:-1], rows_HRD.shape[1])
        by_row_BHQR = by_row_BHQR.scatter_add(-1, indices_BQK[:, None].expand_as(weights), weights)
        output_BHQD = output_BHQD + by_row_BHQR.to(query.dtype).matmul(rows_HRD.to(query))
    return output_BHQD.transpose(1, 2).contiguous(), weights.to(query.dtype)
