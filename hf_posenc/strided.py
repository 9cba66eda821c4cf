"""SDPA with a bias by distance as a strided view of one vector per head: no tensor of queries x keys, however long.

Row q of the bias is the vector read from Q - 1 - q on, so with the queries in reverse, row t is read from t on, which
is a view with both strides 1.

Shape legend: B batch, H heads, Q queries, K keys, D width of a head, L = Q + K - 1 distances.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from .scheme import tracing
from .scores import rows_by_falling_query

CAUSAL_RUN = 256
"""Queries at a time. Measured: fewer cost calls, more cost keys that nobody sees."""
HEADS_AT_A_TIME = 2
"""In the backward pass, where weights are written out for a run of queries: few enough to stay in the caches."""


def strided_bias_pays(query: torch.Tensor) -> bool:
    # Elsewhere the kernels want an aligned mask and would copy the view. Compiled code would copy it too.
    return query.device.type == "cpu" and query.shape[2] > 1 and not tracing()


def sdpa_strided(
    stock: Callable[..., Any],
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    values_HL: torch.Tensor,
    causal: bool,
    scaling: float,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention with the bias as a view. If the bias is trained, with a backward pass of its own."""

    def run(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, values_HL: torch.Tensor) -> torch.Tensor:
        settings = {"scaling": scaling, "dropout": dropout, **kwargs}
        return _in_runs(stock, module, query, key, value, values_HL, causal, **settings)

    if torch.is_grad_enabled() and values_HL.requires_grad and not dropout:
        return _TrainedBias.apply(query, key, value, values_HL, run, causal, scaling), None
    return run(query, key, value, values_HL), None


def _runs(num_queries: int, num_keys: int, causal: bool) -> list[tuple[int, int, int]]:
    """First query, end of the queries, and how many keys they see: the kernel skips none by itself."""
    if not causal:
        return [(0, num_queries, num_keys)]
    starts = range(0, num_queries, CAUSAL_RUN)
    return [(start, min(start + CAUSAL_RUN, num_queries), min(start + CAUSAL_RUN, num_queries)) for start in starts]


def _visible_values(values_HL: torch.Tensor, num_queries: int, causal: bool) -> torch.Tensor:
    if not causal:
        return values_HL
    ahead = torch.arange(values_HL.shape[-1], device=values_HL.device) >= num_queries
    return values_HL.masked_fill(ahead, float("-inf"))


def _in_runs(
    stock: Callable[..., Any],
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    values_HL: torch.Tensor,
    causal: bool,
    **kwargs: Any,
) -> torch.Tensor:
    """(B, Q, H, D): the stock function on each run of queries in reverse, with a view as its mask."""
    length = query.shape[2]
    values_HL = _visible_values(values_HL.to(query.dtype), length, causal)
    outputs = []
    for start, stop, seen in _runs(length, key.shape[2], causal):
        view = rows_by_falling_query(values_HL[:, length - stop :], seen)[None, :, : stop - start]
        some = query[:, :, start:stop].flip(2)
        outputs.append(stock(module, some, key[:, :, :seen], value[:, :, :seen], view, **kwargs)[0].flip(1))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)


class _TrainedBias(torch.autograd.Function):
    """The same with a gradient to the vector: torch's kernels have none to a mask, and would write everything out.

    The backward pass takes runs of queries of two heads at a time: weights anew, then the products by hand. What a
    distance gets is the sum along a diagonal of the logits' gradient, which with rows set apart by one more column
    than they are long is the sum of columns.
    """

    @staticmethod
    def forward(
        ctx: Any, query: Any, key: Any, value: Any, values_HL: Any, run: Any, causal: bool, scaling: float
    ) -> Any:
        output_BQHD = run(query, key, value, values_HL)
        ctx.save_for_backward(query, key, value, values_HL, output_BQHD)
        ctx.causal, ctx.scaling = causal, scaling
        return output_BQHD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BQHD: torch.Tensor) -> Any:
        query, key, value, values_HL, output_BQHD = ctx.saved_tensors
        shared, length = query.shape[1] // key.shape[1], query.shape[2]
        keys, values = (states.repeat_interleave(shared, dim=1) if shared > 1 else states for states in (key, value))
        grad, output = grad_BQHD.transpose(1, 2), output_BQHD.transpose(1, 2)
        wide = torch.promote_types(query.dtype, torch.float32)
        d_query, d_key, d_value = torch.empty_like(query), torch.zeros_like(keys), torch.zeros_like(values)
        d_values_HL = torch.zeros_like(values_HL, dtype=wide)
        visible_HL = _visible_values(values_HL.to(wide), length, ctx.causal)
        for start, stop, seen in _runs(length, key.shape[2], ctx.causal):
            for first in range(0, query.shape[1], HEADS_AT_A_TIME):
                h = slice(first, first + HEADS_AT_A_TIME)
                q, g, o = (states[:, h, start:stop].flip(2) for states in (query, grad, output))
                k, v = keys[:, h, :seen], values[:, h, :seen]
                view = rows_by_falling_query(visible_HL[h, length - stop :], seen)[None, :, : stop - start]
                logits = q.matmul(k.transpose(-1, -2)).to(wide).mul_(ctx.scaling).add_(view)
                weights = logits.softmax(-1)
                d_value[:, h, :seen] += weights.to(g.dtype).transpose(-1, -2).matmul(g)
                d_weights = g.matmul(v.transpose(-1, -2)).to(wide)
                d_logits = d_weights.sub_((g.to(wide) * o).sum(-1, keepdim=True)).mul_(weights)
                sums = diagonal_sums(d_logits.sum(0))
                d_values_HL[h, length - stop : length - stop + sums.shape[-1]] += sums
                d_scaled = (d_logits * ctx.scaling).to(q.dtype)
                d_query[:, h, start:stop] = d_scaled.matmul(k).flip(2)
                d_key[:, h, :seen] += d_scaled.transpose(-1, -2).matmul(q)
        if shared > 1:
            d_key, d_value = (grads.unflatten(1, (-1, shared)).sum(2) for grads in (d_key, d_value))
        return d_query, d_key, d_value, d_values_HL.to(values_HL.dtype), None, None, None


def diagonal_sums(squares_HQK: torch.Tensor) -> torch.Tensor:
    """(H, Q + K - 1): the sum over all queries t and keys j with t + j the same."""
    heads, num_queries, num_keys = squares_HQK.shape
    apart = nn.functional.pad(squares_HQK, (0, num_queries)).flatten(1)
    return apart[:, : num_queries * (num_keys + num_queries - 1)].view(heads, num_queries, -1).sum(1)


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
