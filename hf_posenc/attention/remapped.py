"""Attention in which far keys have another rotation than near ones, so that their distances are remapped.

Keys fall into bands by their position, and each pair of query and key is in exactly one. Either the logits of all bands
are written into one tensor, a chunk of queries at a time, or each band is a call of a kernel that also returns the
log-sum-exp of its logits. Outputs of bands, weighted by these, sum to the exact result.

Shape legend: B batch, H heads, G key heads, Q queries, M queries of a chunk, K keys, S keys of a band, D head size.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ..schemes import is_tracing, repeat_key_heads
from .dispatch import AttentionCall, AttentionOutput, iter_head_slices, slice_heads
from .masks import visible_keys

KERNEL_CHUNK, WEIGHTS_CHUNK = 256, 256
"""Queries per chunk: computed by a kernel, and with explicit weights. Chunks longer than a window compute pairs of the
wrong band, which a mask hides."""
KERNEL_NAME = "_scaled_dot_product_flash_attention_for_cpu"
"""torch's flash attention for CPUs, below scaled_dot_product_attention, which does not return the log-sum-exp."""


@dataclasses.dataclass(frozen=True)
class Band:
    """The keys from one position on and before another, with the queries and keys rotated for each other."""

    query: torch.Tensor
    key: torch.Tensor
    start_BQ: torch.Tensor | None
    stop_BQ: torch.Tensor | None

    def holds(self, keys_BK: torch.Tensor, queries: slice) -> torch.Tensor:
        """(B or 1, 1, M, K): True for keys of this band."""
        inside = None if self.start_BQ is None else keys_BK[:, None] >= self.start_BQ[:, queries, None]
        if self.stop_BQ is not None:
            before = keys_BK[:, None] < self.stop_BQ[:, queries, None]
            inside = before if inside is None else inside & before
        assert inside is not None
        return inside[:, None]

    def columns(self, keys_BK: torch.Tensor, queries: slice) -> slice:
        """The slots that hold this band's keys of any query; all if tensors cannot be read."""
        if is_tracing():
            return slice(0, keys_BK.shape[1])
        held_BK = torch.ones_like(keys_BK, dtype=torch.bool)
        if self.start_BQ is not None:
            held_BK = keys_BK >= self.start_BQ[:, queries].amin(-1, keepdim=True)
        if self.stop_BQ is not None:
            held_BK = held_BK & (keys_BK < self.stop_BQ[:, queries].amax(-1, keepdim=True))
        return _span(held_BK.any(0))

    def full_columns(self, keys_BK: torch.Tensor, queries: slice) -> slice:
        """The slots that hold keys of this band for all queries, and that a causal mask hides from none of them."""
        held_BK = (torch.arange(keys_BK.shape[1], device=keys_BK.device) <= queries.start).expand_as(keys_BK)
        if self.start_BQ is not None:
            held_BK = held_BK & (keys_BK >= self.start_BQ[:, queries].amax(-1, keepdim=True))
        if self.stop_BQ is not None:
            held_BK = held_BK & (keys_BK < self.stop_BQ[:, queries].amin(-1, keepdim=True))
        held_K = held_BK.all(0)
        span = _span(held_K)
        return span if bool(held_K[span].all()) else slice(0, 0)


def _span(held_K: torch.Tensor) -> slice:
    """From the first to the last slot that is True."""
    slots = held_K.nonzero()
    return slice(int(slots[0]), int(slots[-1]) + 1) if len(slots) else slice(0, 0)


def split_bands(call: AttentionCall) -> tuple[list[Band], torch.Tensor]:
    """The bands of an attention, near keys first, and the positions of the keys, (B or 1, K)."""
    assert call.remap is not None
    starts_BQ, keys_BK, rotate_queries, rotate_keys = call.remap
    far_key = rotate_keys(call.key)
    bands = [Band(call.query, call.key, starts_BQ[0], None)]
    for start_BQ, stop_BQ, rotate in zip((*starts_BQ[1:], None), starts_BQ, rotate_queries, strict=True):
        bands.append(Band(rotate(call.query), far_key, start_BQ, stop_BQ))
    return bands, keys_BK[:, : call.key.shape[2]]


def _mask_of(call: AttentionCall, queries: slice) -> torch.Tensor | None:
    """(B or 1, H or 1, M, K): the mask of some queries, boolean or additive; None if there is none."""
    mask, num_keys = call.tensor_mask, call.key.shape[2]
    if mask is not None:
        return mask[..., queries if mask.shape[-2] > 1 else slice(None), :num_keys]
    return None


def _restrict(
    call: AttentionCall, mask: torch.Tensor | None, inside: torch.Tensor, queries: slice, columns: slice
) -> torch.Tensor:
    """True where a key is in a band and visible."""
    if mask is not None:
        return inside & visible_keys(mask[..., columns])
    if not call.causal:
        return inside
    keys, rows = (torch.arange(span.start, span.stop, device=inside.device) for span in (columns, queries))
    return inside & (keys <= rows[:, None])


def _weights(
    call: AttentionCall, bands: Sequence[Band], keys_BK: torch.Tensor, queries: slice, heads: slice, key_heads: slice
) -> torch.Tensor:
    """(B, H, M, K): the attention weights in float32 or wider."""
    mask, wide = _mask_of(call, queries), torch.promote_types(call.query.dtype, torch.float32)
    mask = None if mask is None else slice_heads(mask, 1, heads)
    num_heads, lowest = heads.stop - heads.start, torch.finfo(wide).min
    shape = (call.query.shape[0], num_heads, queries.stop - queries.start, call.key.shape[2])
    logits = call.query.new_full(shape, lowest, dtype=wide)
    for band in bands:
        columns = band.columns(keys_BK, queries)
        if columns.start == columns.stop:
            continue
        key = repeat_key_heads(band.key[:, key_heads, columns], num_heads)
        products = band.query[:, heads, queries].matmul(key.transpose(-1, -2)).to(wide) * call.scaling
        if (softcap := call.stock_kwargs.get("softcap")) is not None:
            products = softcap * torch.tanh(products / softcap)
        if mask is not None and mask.dtype != torch.bool:
            products = (products + mask[..., columns].to(wide)).clamp(min=lowest)
        visible = _restrict(call, mask, band.holds(keys_BK[:, columns], queries), queries, columns)
        logits[..., columns] = torch.where(visible, products, logits[..., columns])
    sinks_H: torch.Tensor | None = call.stock_kwargs.get("s_aux")
    if sinks_H is None:
        return torch.softmax(logits, dim=-1)
    sinks = sinks_H[heads].to(wide).view(1, -1, 1, 1).expand(*shape[:3], 1)
    return torch.softmax(torch.cat([logits, sinks], dim=-1), dim=-1)[..., :-1]


def remapped_attention(call: AttentionCall) -> AttentionOutput:
    """All queries at once, with explicit weights."""
    bands, keys_BK = split_bands(call)
    queries, heads = slice(0, call.query.shape[2]), slice(0, call.query.shape[1])
    weights = _weights(call, bands, keys_BK, queries, heads, slice(0, call.key.shape[1]))
    dropped = nn.functional.dropout(weights, p=call.dropout, training=call.module.training).to(call.value.dtype)
    output_BHQD = dropped.matmul(repeat_key_heads(call.value, heads.stop))
    return output_BHQD.transpose(1, 2).contiguous(), dropped


def remapped_attention_chunked(call: AttentionCall) -> AttentionOutput:
    """A few heads and queries at a time; the backward pass computes their weights again."""
    bands, keys_BK = split_bands(call)
    recompute = torch.is_grad_enabled()

    def attend(queries: slice, heads: slice, key_heads: slice) -> torch.Tensor:
        weights = _weights(call, bands, keys_BK, queries, heads, key_heads)
        weights = nn.functional.dropout(weights, p=call.dropout, training=call.module.training)
        value = repeat_key_heads(call.value[:, key_heads], heads.stop - heads.start)
        return weights.to(value.dtype).matmul(value).transpose(1, 2)

    chunks = []
    for queries in _query_chunks(call, WEIGHTS_CHUNK):
        chunk = [
            checkpoint(attend, queries, *slices, use_reentrant=False) if recompute else attend(queries, *slices)
            for slices in iter_head_slices(call.query, call.key)
        ]
        chunks.append(torch.cat(chunk, dim=2))
    return torch.cat(chunks, dim=1), None


def remapped_attention_merged(call: AttentionCall) -> AttentionOutput:
    """Kernel calls for each band of a few queries, merged by the log-sum-exp of their logits. Without gradients."""
    kernel = getattr(torch.ops.aten, KERNEL_NAME, None)
    if kernel is None or call.value.shape[-1] != call.query.shape[-1]:
        return remapped_attention_chunked(call)
    bands, keys_BK = split_bands(call)
    num_heads = call.query.shape[1]
    bands = [dataclasses.replace(band, key=repeat_key_heads(band.key, num_heads)) for band in bands]
    value = repeat_key_heads(call.value, num_heads)
    output_BQHD = torch.empty_like(call.query.transpose(1, 2), memory_format=torch.contiguous_format)
    triangle = torch.ones(KERNEL_CHUNK, KERNEL_CHUNK, dtype=torch.bool).tril()
    for queries in _query_chunks(call, KERNEL_CHUNK):
        merged: tuple[torch.Tensor, torch.Tensor] | None = None
        for band in bands:
            for columns, masked in _kernel_columns(call, band, keys_BK, queries):
                states = (band.query[:, :, queries], band.key[:, :, columns], value[:, :, columns])
                if not masked:
                    rows, (output, lse) = slice(None), kernel(*states, 0.0, False, scale=call.scaling)
                else:
                    visible = _restrict(
                        call, _mask_of(call, queries), band.holds(keys_BK[:, columns], queries), queries, columns
                    )
                    rows, output, lse = _masked_kernel(kernel, call, states, visible, triangle, queries, columns)
                if merged is None:
                    merged = output, lse
                else:
                    _merge_into(merged, rows, output, lse)
        assert merged is not None
        output_BQHD[:, queries] = merged[0].transpose(1, 2)
    return output_BQHD, None


def _kernel_columns(call: AttentionCall, band: Band, keys_BK: torch.Tensor, queries: slice) -> list[tuple[slice, bool]]:
    """The slots of a band in runs, and whether each needs a mask; the first run has keys for all queries.

    Of contiguous positions, the run with the latest keys is a triangle, for which kernels need no mask.
    """
    columns = band.columns(keys_BK, queries)
    if not call.causal:
        return [(columns, True)] if columns.start < columns.stop else []
    columns, full = slice(columns.start, min(columns.stop, queries.stop)), band.full_columns(keys_BK, queries)
    runs = [(columns, True)]
    if full.start < full.stop:
        cut = full.stop
        if full.stop < columns.stop:
            cut = max(full.start, min(full.stop, columns.stop - (queries.stop - queries.start)))
        latest, earliest = slice(cut, columns.stop), slice(columns.start, full.start)
        runs = [(latest, True), (slice(full.start, cut), False), (earliest, True)]
        if cut > full.start:
            runs[:2] = runs[1::-1]
    return [run for run in runs if run[0].start < run[0].stop]


def _masked_kernel(
    kernel: Any,
    call: AttentionCall,
    states: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    visible: torch.Tensor,
    triangle: torch.Tensor,
    queries: slice,
    columns: slice,
) -> tuple[slice, torch.Tensor, torch.Tensor]:
    """The rows of queries that see some of the slots, with their outputs and log-sum-exps.

    A kernel skips the hidden half of a triangle, but computes what a mask hides.
    """
    query, key, value = states
    if call.causal and _equals_corner(visible, triangle):
        return slice(None), *kernel(*states, 0.0, True, scale=call.scaling)
    if call.causal and _equals_corner(visible[..., :-1, :], triangle.T) and not visible[..., -1, :].any():
        flipped = (query[:, :, :-1].flip(2), key.flip(2), value.flip(2))
        output, lse = kernel(*flipped, 0.0, True, scale=call.scaling)
        return slice(0, -1), output.flip(2), lse.flip(2)
    mask, bias = _mask_of(call, queries), value.new_zeros(())
    if mask is not None and mask.dtype != torch.bool:
        bias = mask[..., columns].to(value.dtype)
    bias = torch.where(visible, bias, torch.finfo(value.dtype).min)
    return slice(None), *kernel(*states, 0.0, False, attn_mask=bias, scale=call.scaling)


def _equals_corner(visible: torch.Tensor, triangle: torch.Tensor) -> bool:
    """Whether each row of a batch is the same square of True on one side of the diagonal."""
    rows, columns = visible.shape[-2:]
    return rows == columns and torch.equal(visible, triangle[:rows, :rows].expand_as(visible))


def _merge_into(
    merged: tuple[torch.Tensor, torch.Tensor], rows: slice, new_output: torch.Tensor, new_lse: torch.Tensor
) -> None:
    """Add attention over other keys, in place; weights sum to exp(lse) before they are normalized."""
    output, lse = (tensor[:, :, rows] for tensor in merged)
    total = torch.logaddexp(lse, new_lse)
    old_weight, new_weight = ((part - total).exp_().unsqueeze(-1) for part in (lse, new_lse))
    output.mul_(old_weight).add_(new_output.mul_(new_weight))
    lse.copy_(total)


def _query_chunks(call: AttentionCall, size: int) -> list[slice]:
    length = call.query.shape[2]
    return [slice(start, min(start + size, length)) for start in range(0, length, size)]
