"""SDPA with a bias by distance as a strided view of one vector per head: no tensor of queries x keys, however long.

Row q of the bias is the vector read from Q - 1 - q on, so with the queries in reverse, row t is read from t on, which
is a view with both strides 1.

Shape legend: B batch, H heads, Q queries, K keys, D width of a head, L = Q + K - 1 distances.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import nn

from ..schemes.terms import DistanceBias
from .call import AttentionCall
from .chunked import ChunkPlan, attention_with_chunked_backward
from .materialize import strided_bias

CAUSAL_RUN = 256
"""Queries at a time. Measured: fewer cost calls, more cost keys that nobody sees."""


def strided_attention(call: AttentionCall, values_HL: torch.Tensor) -> torch.Tensor:
    """(B, Q, H, D): attention with the bias as a view. If the bias is trained, with a backward pass of its own."""
    if not (torch.is_grad_enabled() and values_HL.requires_grad):
        return _in_runs(call, call.query, call.key, call.value, values_HL, rising=True)

    def forward(plan: ChunkPlan, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return _in_runs(call, query, key, value, plan.blocks[0].tensors[0], rising=False)

    return attention_with_chunked_backward(dataclasses.replace(call, terms=[DistanceBias(values_HL)]), forward)


def _in_runs(
    call: AttentionCall,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    values_HL: torch.Tensor,
    rising: bool,
) -> torch.Tensor:
    """The stock function on each run of queries, in falling order, with a view as its mask.

    `rising`: the queries come in the order of the keys, and so shall the output; a run is turned round at a time.
    """
    length = query.shape[2]
    values_HL = values_HL.to(query.dtype).contiguous()  # of a view with other strides, the kernel makes a copy
    size = CAUSAL_RUN if call.causal else length
    if call.causal:
        ahead = torch.arange(values_HL.shape[-1], device=values_HL.device) >= length
        values_HL = values_HL.masked_fill(ahead, float("-inf"))
    pieces: list[torch.Tensor] = []
    whole: torch.Tensor | None = None
    for start in range(0, length, size):
        stop = min(start + size, length)
        seen = length - start if call.causal else key.shape[2]  # with a mask, the kernel skips none that nobody sees
        view = strided_bias(values_HL[:, start : stop + seen - 1], seen)[None]
        run = query[:, :, length - stop : length - start].flip(2) if rising else query[:, :, start:stop]
        output_BQHD = call.run_stock(run, key[:, :, :seen], value[:, :, :seen], view)[0]
        pieces.append(output_BQHD.flip(1) if rising else output_BQHD)
        if not torch.is_grad_enabled():  # pieces beside a whole made of them would be twice the memory
            piece = pieces.pop()
            if whole is None:
                whole = piece.new_empty(piece.shape[0], length, *piece.shape[2:])
            whole.narrow(1, length - stop if rising else start, stop - start).copy_(piece)
    return whole if whole is not None else torch.cat(pieces[::-1] if rising else pieces, dim=1)


def strided_attention_unpadded(call: AttentionCall, values_HL: torch.Tensor) -> torch.Tensor:
    """`sdpa_strided` on what is not padding of each row: rows of equal padding together, and no mask at all.

    A mask of keys is no function of the distance. But without its padding, each row is a plain input.
    """
    spans, length = call.positions.spans, call.query.shape[2]
    assert spans is not None
    outputs: list[torch.Tensor | None] = [None] * len(spans)
    for start, stop in dict.fromkeys(spans):
        rows = [row for row, span in enumerate(spans) if span == (start, stop)]
        own = values_HL[:, length - (stop - start) : length - 1 + (stop - start)]
        q, k, v = (states[rows][:, :, start:stop] for states in (call.query, call.key, call.value))
        output_BQHD = q.transpose(1, 2)
        if start < stop:  # a row may be nothing but padding
            causal = call.positions.causal and stop - start > 1
            inner = dataclasses.replace(call, query=q, key=k, value=v, attention_mask=None, causal=causal)
            output_BQHD = strided_attention(inner, own)
        padded = nn.functional.pad(output_BQHD, (0, 0, 0, 0, start, length - stop))
        for row, output in zip(rows, padded, strict=True):
            outputs[row] = output
    return torch.stack(outputs)  # type: ignore[arg-type]
