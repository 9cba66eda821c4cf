"""A bias by distance as a dense mask for SDPA, at the width of the model's dtype.

The vectors of the heads are narrowed and masked before they are expanded: a half-precision mask costs 2 bytes per
score, and nothing wider ever has a number per score. The backward pass sums each diagonal in float32 or wider.

Shape legend: B batch, H heads, Q queries, K keys, M queries of a chunk, L = Q + K - 1 distances.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from .bands import skew
from .masks import narrow_bias

BACKWARD_CHUNK = 2**22
"""Scores whose gradient is widened at a time."""


def distance_mask(
    values_HL: torch.Tensor, mask: torch.Tensor | None, causal: bool, num_keys: int, dtype: torch.dtype
) -> torch.Tensor:
    """The bias of each pair of query and key, with the lowest finite number at hidden keys.

    Args:
        values_HL: The bias by distance, of each head or of all.
        mask: True at visible keys, (B or 1, H or 1, Q, at least K); None if all are, but for `causal`.
        causal: Whether later keys are hidden, if there is no mask.
        num_keys: The number of keys.
        dtype: The dtype of the result.

    Returns:
        The mask, (B or 1, H or 1, Q, K), contiguous.
    """
    if mask is not None:
        mask = mask[..., :num_keys]
        values_HL = values_HL.expand(max(mask.shape[1], values_HL.shape[0]), -1)
    result: torch.Tensor = _DistanceMask.apply(values_HL, mask, causal, num_keys, dtype)  # type: ignore[no-untyped-call]
    return result


class _DistanceMask(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, values_HL: torch.Tensor, mask: torch.Tensor | None, causal: bool, num_keys: int, dtype: torch.dtype
    ) -> torch.Tensor:
        ctx.save_for_backward(*([] if mask is None else [mask]))
        ctx.causal, ctx.dtype, ctx.num_keys = causal and mask is None, values_HL.dtype, num_keys
        lowest = values_HL.new_full((), torch.finfo(dtype).min, dtype=dtype)
        narrow_HL = narrow_bias(values_HL, dtype)
        num_queries = narrow_HL.shape[-1] - num_keys + 1
        if ctx.causal:
            is_later = torch.arange(narrow_HL.shape[-1], device=narrow_HL.device) >= num_queries
            narrow_HL = torch.where(is_later, lowest, narrow_HL)
        reversed_HQK = narrow_HL.unfold(-1, num_keys, 1)  # a view, queries in reverse order
        if mask is None:
            return reversed_HQK.flip(-2)[None]
        num_heads = narrow_HL.shape[0]
        bias_BHQK = narrow_HL.new_empty(mask.shape[0], num_heads, num_queries, num_keys)
        for head in range(num_heads):  # flipping copies, so one head at a time
            visible = mask[:, head if mask.shape[1] > 1 else 0]
            torch.where(visible, reversed_HQK[head].flip(-2), lowest, out=bias_BHQK[:, head])
        return bias_BHQK

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_bias_BHQK: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (mask,) = ctx.saved_tensors or (None,)
        batch, num_heads, num_queries, num_keys = d_bias_BHQK.shape
        wide = torch.promote_types(ctx.dtype, torch.float32)
        d_values_HL = d_bias_BHQK.new_zeros(num_heads, num_queries + num_keys - 1, dtype=wide)
        size = max(BACKWARD_CHUNK // (batch * num_heads * num_keys), 1)
        for start in range(0, num_queries, size):
            stop = min(start + size, num_queries)
            d_chunk_BHMK = d_bias_BHQK[:, :, start:stop].to(wide)
            if mask is not None:
                rows = mask if mask.shape[2] == 1 else mask[:, :, start:stop]
                d_chunk_BHMK = d_chunk_BHMK.masked_fill(~rows, 0)
            sums_HL = skew(d_chunk_BHMK.flip(2), wide).sum((1, 2))
            d_values_HL[:, num_queries - stop : num_queries - start + num_keys - 1] += sums_HL
        if ctx.causal:
            d_values_HL[:, num_queries:] = 0
        return d_values_HL.to(ctx.dtype), None, None, None, None
