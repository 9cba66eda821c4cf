"""Fused attention with a bias by head and distance, by Triton kernels, with gradients of all inputs.

flex_attention adds to the gradient of a bias once per score. Here, whole bands of scores are summed first, in the same
order in every run.

Shape legend: B batch, H heads, G key heads, Q queries, K keys, D head size, E head size of the values, L = Q + K - 1
distances.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable

from .dense import sum_terms
from .dispatch import AttentionCall, AttentionOutput
from .key_spans import KeySpans
from .triton_support import call_spans


class Tiling(NamedTuple):
    """How a kernel divides its work.

    Chosen by what ptxas reports for sm_80 and sm_90, not by speed: for heads of 128 in bfloat16, no registers spill,
    and kernels for sm_80 fit into 99 KB of shared memory, which is what consumer GPUs have.
    """

    block_q: int
    block_k: int
    num_warps: int
    num_stages: int


class Tilings(NamedTuple):
    """The tilings of all kernels. `backward_bias` has square tiles."""

    forward: Tiling
    backward_query: Tiling
    backward_key: Tiling
    backward_bias: Tiling


def choose_tilings(head_size: int, dtype: torch.dtype) -> Tilings:
    """The tilings for the padded size of a head."""
    if dtype == torch.float32:
        return Tilings(Tiling(32, 32, 8, 2), Tiling(32, 32, 8, 1), Tiling(32, 32, 8, 1), Tiling(32, 32, 8, 1))
    if head_size <= 64:
        return Tilings(Tiling(64, 64, 4, 3), Tiling(64, 64, 8, 2), Tiling(32, 64, 8, 2), Tiling(32, 32, 4, 2))
    return Tilings(Tiling(64, 64, 8, 2), Tiling(64, 64, 8, 2), Tiling(32, 64, 8, 1), Tiling(32, 32, 4, 2))


@dataclasses.dataclass(frozen=True)
class _Settings:
    scaling: float
    causal: bool
    spans: KeySpans | None
    dropout: float

    @property
    def visible(self) -> str:
        return "spans" if self.spans is not None else "causal" if self.causal else "all"


def triton_attention(call: AttentionCall) -> AttentionOutput:
    """Attention with a bias that depends on head and distance only, by the Triton kernels."""
    spans = None if call.attention_mask is None else call_spans(call)
    assert call.attention_mask is None or spans is not None
    output_BQHE = attention_with_distance_bias(
        call.query,
        call.key,
        call.value,
        sum_terms(call),
        scaling=call.scaling,
        causal=call.causal,
        spans=spans,
        dropout=call.dropout,
    )
    return output_BQHE, None


def attention_with_distance_bias(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bias_HL: torch.Tensor,
    *,
    scaling: float,
    causal: bool = False,
    spans: KeySpans | None = None,
    dropout: float = 0.0,
) -> torch.Tensor:
    """Compute softmax(scaling q.k + bias) v without a number per score in memory.

    Queries that see no key get zeros.

    Args:
        query: (B, H, Q, D), float32, bfloat16 or float16.
        key: (B, G, K, D).
        value: (B, G, K, E).
        bias_HL: The bias by distance, of each head or one for all: key j and query i have element j - i + Q - 1.
        scaling: What products of queries and keys are multiplied by.
        causal: Whether later keys are hidden. The last query sees all keys.
        spans: The keys that each query sees; replaces `causal`.
        dropout: The probability with which a weight is dropped. Which ones depends on torch's random state.

    Returns:
        The output, (B, Q, H, E).
    """
    settings = _Settings(scaling, causal, spans, dropout)
    seed = torch.randint(2**62, (1,), device=query.device) if dropout > 0 else None  # stays on the device
    output_BHQE: torch.Tensor = _DistanceBiasAttention.apply(query, key, value, bias_HL, seed, settings)  # type: ignore[no-untyped-call]
    return output_BHQE.transpose(1, 2)


class _DistanceBiasAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        bias_HL: torch.Tensor,
        seed: torch.Tensor | None,
        settings: _Settings,
    ) -> torch.Tensor:
        from .triton_kernels import forward_kernel

        query, key, value = map(_with_adjacent_columns, (query, key, value))
        bias = (bias_HL.float() / math.log(2)).contiguous()
        output = _empty_by_token(query, value.shape[-1])
        log_sums = query.new_empty(query.shape[:3], dtype=torch.float32)
        ctx.save_for_backward(query, key, value, bias, seed, output, log_sums)
        ctx.settings, ctx.bias_dtype = settings, bias_HL.dtype
        tiling = choose_tilings(_padded(query, value), query.dtype).forward
        _launch(
            forward_kernel,
            query.shape[0] * query.shape[1] * _num_tiles(query.shape[2], tiling.block_q),
            tiling,
            (query, key, value, bias, _spans(settings, bias), bias if seed is None else seed, output, log_sums),
            (*map(_strides, (query, key, value, output)), _head_stride(bias), *_numbers(query, key, settings)),
            _constants(query, value, settings),
        )
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_output: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        from .triton_kernels import backward_bias_kernel, backward_key_kernel, backward_query_kernel

        query, key, value, bias, seed, output, log_sums = ctx.saved_tensors
        (batch_size, num_heads, num_queries, _), num_keys = query.shape, key.shape[2]
        settings, d_output = ctx.settings, _with_adjacent_columns(d_output)
        seed = bias if seed is None else seed
        tilings = choose_tilings(_padded(query, value), query.dtype)
        inputs = (query, key, value, bias, _spans(settings, bias))
        numbers, constants = _numbers(query, key, settings), _constants(query, value, settings)
        deltas, d_query = torch.empty_like(log_sums), _empty_by_token(query, query.shape[-1])
        _launch(  # first, because it computes the deltas
            backward_query_kernel,
            batch_size * num_heads * _num_tiles(num_queries, tilings.backward_query.block_q),
            tilings.backward_query,
            (*inputs, seed, output, log_sums, d_output, deltas, d_query),
            (*map(_strides, (query, key, value, output, d_output, d_query)), _head_stride(bias), *numbers),
            constants,
        )
        d_key = d_value = d_bias = None
        if any(ctx.needs_input_grad[1:3]):
            tiling = tilings.backward_key
            ranges = bias if settings.spans is None else settings.spans.query_ranges(tiling.block_q, tiling.block_k)
            d_key, d_value = (_empty_by_token(states, states.shape[-1]) for states in (key, value))
            _launch(
                backward_key_kernel,
                batch_size * key.shape[1] * _num_tiles(num_keys, tiling.block_k),
                tiling,
                (*inputs, ranges, seed, log_sums, d_output, deltas, d_key, d_value),
                (*map(_strides, (query, key, value, d_output, d_key, d_value)), _head_stride(bias), *numbers),
                constants,
            )
        if ctx.needs_input_grad[3]:
            tiling = tilings.backward_bias
            num_bands = _num_tiles(num_queries, tiling.block_q) + _num_tiles(num_keys, tiling.block_k) - 1
            ranges = bias if settings.spans is None else settings.spans.band_ranges(tiling.block_q)
            d_bias = bias.new_zeros(num_heads, bias.shape[1])
            _launch(
                backward_bias_kernel,
                num_heads * num_bands,
                tiling,
                (*inputs, ranges, seed, log_sums, d_output, deltas, d_bias),
                (*map(_strides, (query, key, value, d_output)), _head_stride(bias), batch_size, *numbers),
                constants,
            )
            d_bias = d_bias.sum_to_size(bias.shape).to(ctx.bias_dtype)
        return d_query, d_key, d_value, d_bias, None, None


def _launch(
    kernel: Any,
    num_programs: int,
    tiling: Tiling,
    tensors: tuple[torch.Tensor, ...],
    numbers: tuple[Any, ...],
    constants: dict[str, Any],
) -> None:
    """Run a kernel on the device of its tensors, which need not be the current one."""
    device = tensors[0].device
    with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
        kernel[(num_programs,)](*tensors, *numbers, **constants, **_options(tiling))


def _options(tiling: Tiling) -> dict[str, int]:
    return {
        "BLOCK_Q": tiling.block_q,
        "BLOCK_K": tiling.block_k,
        "num_warps": tiling.num_warps,
        "num_stages": tiling.num_stages,
    }


def _num_tiles(length: int, block: int) -> int:
    return -(-length // block)


def _numbers(query: torch.Tensor, key: torch.Tensor, settings: _Settings) -> tuple[float | int, ...]:
    """Scaling, dropout, heads, heads per key head, queries and keys: what ends the numbers of every kernel."""
    num_heads, num_queries = query.shape[1:3]
    num_key_heads, num_keys = key.shape[1:3]
    return settings.scaling, settings.dropout, num_heads, num_heads // num_key_heads, num_queries, num_keys


def _constants(query: torch.Tensor, value: torch.Tensor, settings: _Settings) -> dict[str, Any]:
    """What kernels are compiled for."""
    return {
        "HEAD_SIZE": query.shape[-1],
        "PADDED_HEAD_SIZE": _padded(query),
        "VALUE_SIZE": value.shape[-1],
        "PADDED_VALUE_SIZE": _padded(value),
        "VISIBLE": settings.visible,
        "HAS_DROPOUT": settings.dropout > 0,
        # as flex_attention decides
        "PRECISION": "ieee" if torch.get_float32_matmul_precision() == "highest" else "tf32",
    }


def _padded(*tensors: torch.Tensor) -> int:
    """The next power of two of the largest head size; products of matrices need at least 16."""
    return max(16, *(1 << (tensor.shape[-1] - 1).bit_length() for tensor in tensors))


def _spans(settings: _Settings, unused: torch.Tensor) -> torch.Tensor:
    """The spans, or a tensor that the kernel does not read."""
    return unused if settings.spans is None else settings.spans.spans_BQ2


def _strides(states: torch.Tensor) -> tuple[int, ...]:
    return states.stride()[:3]


def _head_stride(vectors_HL: torch.Tensor) -> int:
    """Zero if all heads share one vector."""
    return 0 if vectors_HL.shape[0] == 1 else vectors_HL.stride(0)


def _with_adjacent_columns(states: torch.Tensor) -> torch.Tensor:
    return states if states.stride(-1) == 1 else states.contiguous()


def _empty_by_token(states: torch.Tensor, size: int) -> torch.Tensor:
    """(B, H, N, size): empty, in memory by token first and then by head, as the layer goes on to use it."""
    batch_size, num_heads, length, _ = states.shape
    return states.new_empty(batch_size, length, num_heads, size).transpose(1, 2)
