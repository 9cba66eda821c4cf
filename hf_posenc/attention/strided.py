"""SDPA with the bias as a strided view of one vector per head: no Q x K tensor at any length.

Row q of the bias is the vector read from element Q - 1 - q on. With the queries reversed, row t is read from t on,
which is a view with both strides 1.

Shape legend: B batch, H heads, Q queries, K keys, D head size, L = Q + K - 1 distances.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import nn

from ..schemes import DistanceBias
from .chunked import ChunkPlan, attention_with_chunked_backward
from .dense import strided_bias, sum_terms
from .dispatch import AttentionCall, AttentionOutput

CAUSAL_CHUNK = 256
"""Queries per kernel call. Tuned on CPU: fewer add call overhead, more compute keys that the mask hides."""


def strided_attention(call: AttentionCall) -> AttentionOutput:
    """SDPA with the bias as a view; if the bias is trained, with the chunked backward pass."""
    return _attend(call, sum_terms(call)), None


def strided_attention_unpadded(call: AttentionCall) -> AttentionOutput:
    """The same on each row without its padded keys, so that it needs no mask. Rows with equal padding go together.

    Queries at padding see the keys that the mask shows them: `generate` reads the last slot of right-padded prompts.
    """
    values_HL, spans = sum_terms(call), call.positions.spans
    assert spans is not None
    outputs: dict[int, torch.Tensor] = {}
    for start, stop in dict.fromkeys(spans):
        rows = [row for row, span in enumerate(spans) if span == (start, stop)]
        outputs.update(zip(rows, _attend_to_span(call, values_HL, rows, start, stop), strict=True))
    return torch.stack([outputs[row] for row in range(len(spans))]), None


def _attend_to_span(
    call: AttentionCall, values_HL: torch.Tensor, rows: list[int], start: int, stop: int
) -> torch.Tensor:
    """(B, Q, H, D): the output of some rows, whose tokens are in slots from `start` to `stop`."""
    query, length = call.query[rows], call.query.shape[2]
    key, value = (states[rows][:, :, start:stop] for states in (call.key, call.value))
    # Causal queries before the first token see nothing, and those after the last one see everything.
    query_spans = [(start, stop), (stop, length)] if call.positions.causal else [(0, length)]
    outputs = []
    for first, end in query_spans if start < stop else ():  # a row may be all padding
        if first < end:
            causal = call.positions.causal and first == start and end - first > 1
            queries = query[:, :, first:end]
            unpadded = dataclasses.replace(
                call, query=queries, key=key, value=value, attention_mask=None, causal=causal
            )
            outputs.append(_attend(unpadded, values_HL[:, length - end + start : length - 1 + stop - first]))
    output_BQHD = torch.cat(outputs, dim=1) if outputs else value.new_zeros(len(rows), 0, *query.shape[1::2])
    return nn.functional.pad(output_BQHD, (0, 0, 0, 0, length - output_BQHD.shape[1], 0))


def _attend(call: AttentionCall, values_HL: torch.Tensor) -> torch.Tensor:
    if not (torch.is_grad_enabled() and values_HL.requires_grad):
        return _forward(call, call.query, call.key, call.value, values_HL, reverse=True)

    def forward(plan: ChunkPlan, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return _forward(call, query, key, value, plan.score_blocks[0].tensors[0], reverse=False)

    return attention_with_chunked_backward(dataclasses.replace(call, terms=[DistanceBias(values_HL)]), forward)


def _forward(
    call: AttentionCall,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    values_HL: torch.Tensor,
    reverse: bool,
) -> torch.Tensor:
    """Run the stock function on chunks of reversed queries; `reverse` if query and output are in the usual order."""
    length = query.shape[2]
    values_HL = values_HL.to(query.dtype).contiguous()  # the kernel copies views with other strides
    size = CAUSAL_CHUNK if call.causal else length
    if call.causal:
        is_later = torch.arange(values_HL.shape[-1], device=values_HL.device) >= length
        values_HL = values_HL.masked_fill(is_later, float("-inf"))
    chunks: list[torch.Tensor] = []
    output: torch.Tensor | None = None
    for start in range(0, length, size):
        stop = min(start + size, length)
        num_keys = length - start if call.causal else key.shape[2]  # given a mask, the kernel does not skip hidden keys
        view = strided_bias(values_HL[:, start : stop + num_keys - 1], num_keys)[None]
        queries = query[:, :, length - stop : length - start].flip(2) if reverse else query[:, :, start:stop]
        chunk_BQHD = call.run_stock(queries, key[:, :, :num_keys], value[:, :, :num_keys], view)[0]
        chunk_BQHD = chunk_BQHD.flip(1) if reverse else chunk_BQHD
        if torch.is_grad_enabled():
            chunks.append(chunk_BQHD)
            continue
        if output is None:  # copying each chunk at once avoids holding all of them next to their concatenation
            output = chunk_BQHD.new_empty(chunk_BQHD.shape[0], length, *chunk_BQHD.shape[2:])
        output.narrow(1, length - stop if reverse else start, stop - start).copy_(chunk_BQHD)
    return output if output is not None else torch.cat(chunks[::-1] if reverse else chunks, dim=1)
