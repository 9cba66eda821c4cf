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
from .scores import rows_by_falling_query


def strided_bias_pays(query: torch.Tensor) -> bool:
    # Elsewhere the kernels want an aligned mask and would copy the view. Compiled code would copy it too.
    return query.device.type == "cpu" and query.shape[2] > 1 and not tracing()


CAUSAL_RUN = 256
"""Queries at a time. Measured: fewer cost calls, more cost keys that nobody sees."""


def sdpa_strided(
    stock: Callable[..., Any],
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    values_HL: torch.Tensor,
    causal: bool,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """SDPA with the bias as a strided view of one vector per head: no Q x K tensor, however long the input.

    Row q of the bias is the vector read from Q - 1 - q on, so with the queries in reverse, row t is read from t on,
    which is a view with both strides 1.
    """
    values_HL = values_HL.to(query.dtype)
    length = query.shape[2]
    if not causal:
        view = rows_by_falling_query(values_HL, key.shape[2])[None]
        output_BQHD, weights = stock(module, query.flip(2), key, value, view, **kwargs)
        return output_BQHD.flip(1), weights
    ahead = torch.arange(values_HL.shape[-1], device=values_HL.device) >= length
    values_HL = values_HL.masked_fill(ahead, float("-inf"))
    outputs = []
    for start in range(0, length, CAUSAL_RUN):  # each run with the keys up to its end: the kernel skips none by itself
        stop = min(start + CAUSAL_RUN, length)
        view = rows_by_falling_query(values_HL[:, length - stop :], stop)[None, :, : stop - start]
        some = query[:, :, start:stop].flip(2)
        outputs.append(stock(module, some, key[:, :, :stop], value[:, :, :stop], view, **kwargs)[0].flip(1))
    return torch.cat(outputs, dim=1), None


def sdpa_strided_by_rows(
    stock: Callable[..., Any],
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    values_HL: torch.Tensor,
    causal: bool,
    spans: tuple[tuple[int, int], ...],
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """`sdpa_strided` on what is not padding of each row: rows of equal padding together, and no mask at all.

    A mask of keys is no function of the distance. But without its padding, each row is a plain input.
    """
    length = query.shape[2]
    outputs: list[torch.Tensor | None] = [None] * len(spans)
    for start, stop in dict.fromkeys(spans):
        rows = [row for row, span in enumerate(spans) if span == (start, stop)]
        inside = slice(start, stop)
        own = values_HL[:, length - (stop - start) : length - 1 + (stop - start)]
        q, k, v = (states[rows][:, :, inside] for states in (query, key, value))
        output_BQHD = q.transpose(1, 2)
        if start < stop:  # a row may be nothing but padding
            output_BQHD, _ = sdpa_strided(stock, module, q, k, v, own, causal, **kwargs)
        padded = nn.functional.pad(output_BQHD, (0, 0, 0, 0, start, length - stop))
        for row, output in zip(rows, padded, strict=True):
            outputs[row] = output
    return torch.stack(outputs), None  # type: ignore[arg-type]


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
