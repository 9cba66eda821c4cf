"""Attention over chunks of a few heads and queries, with its own backward pass: all logits never exist at once.

torch's kernels compute no gradient of a mask without a dense copy of it. Here the backward pass recomputes the weights
of a chunk, as flash attention does, and passes the gradient of its logits to each term. Queries, outputs and their
gradients are in reverse order (see `bands`).

Shape legend: B batch, H heads, G key heads, Q queries, M queries of a chunk, S keys visible to it, D head size.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias, TypeVar

import torch
from torch.autograd.function import once_differentiable

from .blocks import Chunk, KeyBlock, QueryBlock, ScoreBlock, ValueBlock, iter_chunks, make_score_block, make_value_block
from .dispatch import AttentionCall, AttentionOutput, slice_heads
from .masks import apply_mask, narrow_bias

KERNEL_CHUNK, WEIGHTS_CHUNK, KEY_TERM_CHUNK = 1024, 256, 512
"""Queries per chunk, tuned on CPU: computed by SDPA; with explicit weights, which should stay in the CPU's cache; and
with explicit weights and key terms, whose tiles have queries as columns and waste less the wider they are."""
T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class ChunkPlan:
    """Everything about an attention but its tensors, which autograd must see and may offload."""

    score_blocks: tuple[ScoreBlock, ...]
    value_blocks: tuple[ValueBlock, ...]
    mask: torch.Tensor | None
    causal: bool
    scaling: float
    dropout: float
    seed: int
    """Seeds the dropout, so that the backward pass drops the same weights as the forward pass."""
    bias_dtype: torch.dtype

    @classmethod
    def from_call(cls, call: AttentionCall) -> ChunkPlan:
        # The first block overwrites, the others add: a query block overwrites fastest, row by row.
        score_blocks = [make_score_block(term, call) for term in call.terms]
        score_blocks.sort(key=lambda block: not isinstance(block, QueryBlock))
        return cls(
            score_blocks=tuple(score_blocks),
            value_blocks=tuple(make_value_block(table, call) for table in call.value_tables),
            mask=call.tensor_mask,
            causal=call.causal,
            scaling=call.scaling,
            dropout=call.dropout,
            seed=int(torch.randint(2**62, ())) if call.dropout else 0,
            bias_dtype=call.positions.dtype,
        )

    @property
    def blocks(self) -> tuple[ScoreBlock | ValueBlock, ...]:
        return self.score_blocks + self.value_blocks

    def split(self, values: Iterable[T]) -> list[list[T]]:
        """Split values that belong to the tensors of all blocks by block."""
        iterator = iter(values)
        return [[next(iterator) for _ in block.tensors] for block in self.blocks]

    def with_tensors(self, tensors: Iterable[torch.Tensor]) -> ChunkPlan:
        split = iter(self.split(tensors))
        return dataclasses.replace(
            self,
            score_blocks=tuple(block.with_tensors(next(split)) for block in self.score_blocks),
            value_blocks=tuple(block.with_tensors(next(split)) for block in self.value_blocks),
        )

    @property
    def needs_weights(self) -> bool:
        """Whether the forward pass needs explicit weights; the backward pass always does."""
        return bool(self.dropout or self.value_blocks)

    @property
    def weights_chunk(self) -> int:
        return KEY_TERM_CHUNK if any(isinstance(block, KeyBlock) for block in self.score_blocks) else WEIGHTS_CHUNK


ForwardPass: TypeAlias = Callable[[ChunkPlan, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Computes the output, (B, Q, H, D), of a plan, reversed queries, keys and values."""


def chunked_attention(call: AttentionCall) -> AttentionOutput:
    """Attention under any score and value terms, if positions are uniform."""

    def forward(plan: ChunkPlan, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        output_BQHD = query.new_empty(query.shape[0], query.shape[2], query.shape[1], value.shape[-1])
        memory = None if plan.needs_weights else _allocate_bias(plan, query, key)
        for chunk in iter_chunks(query, key, plan.causal, plan.weights_chunk if memory is None else KERNEL_CHUNK):
            if memory is None:
                weights, keep = _weights(plan, chunk, query, key)
                weights = weights if keep is None else weights * keep
                chunk_BQHD = _weighted_values(plan, chunk, weights, value).transpose(1, 2)
            else:
                mask = _apply_mask(plan, chunk, narrow_bias(_bias(plan, chunk, memory), query.dtype))
                k, v = (states[:, chunk.key_heads, : chunk.num_keys] for states in (key, value))
                chunk_BQHD = call.run_stock(query[:, chunk.heads, chunk.queries], k, v, mask)[0]
            output_BQHD[:, chunk.queries, chunk.heads].copy_(chunk_BQHD)
        return output_BQHD

    return attention_with_chunked_backward(call, forward), None


def attention_with_chunked_backward(call: AttentionCall, forward: ForwardPass) -> torch.Tensor:
    """(B, Q, H, D): the given forward pass, with a backward pass that recomputes chunk by chunk."""
    plan = ChunkPlan.from_call(call)
    block_tensors = [tensor for block in plan.blocks for tensor in block.tensors]
    tensors = [call.query.flip(2), call.key, call.value, *block_tensors]
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        plan = plan.with_tensors([tensor.new_empty(0) for tensor in block_tensors])
        output_BQHD: torch.Tensor = _ChunkedAttention.apply(plan, forward, *tensors)  # type: ignore[no-untyped-call]
        return output_BQHD.flip(1)
    return forward(plan, *tensors[:3]).flip(1)


def _allocate_bias(plan: ChunkPlan, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Memory for the largest chunk's bias, reused by all: allocating new pages costs more than filling them."""
    batch_size = max(block.batch_size for block in plan.score_blocks)
    chunks = iter_chunks(query, key, plan.causal, KERNEL_CHUNK)
    size = max(chunk.num_heads * (chunk.stop - chunk.start) * chunk.num_keys for chunk in chunks)
    return query.new_empty(batch_size, size, dtype=plan.bias_dtype)


def _bias(plan: ChunkPlan, chunk: Chunk, memory: torch.Tensor) -> torch.Tensor:
    """(B or 1, H, M, S): the sum of the score terms."""
    shape = (memory.shape[0], chunk.num_heads, chunk.stop - chunk.start, chunk.num_keys)
    bias_BHMS = memory.view(-1)[: math.prod(shape)].view(shape)
    for index, block in enumerate(plan.score_blocks):
        block.write(bias_BHMS, chunk, overwrite=index == 0)
    return bias_BHMS


def _apply_mask(plan: ChunkPlan, chunk: Chunk, bias_BHMS: torch.Tensor) -> torch.Tensor:
    """The bias with the lowest finite number at keys hidden from the chunk's queries; may work in place."""
    if plan.mask is not None:
        mask, num_queries = slice_heads(plan.mask, 1, chunk.heads), plan.mask.shape[-2]
        if num_queries > 1:
            mask = mask[..., num_queries - chunk.stop : num_queries - chunk.start, :].flip(-2)
        return apply_mask(bias_BHMS, mask[..., : chunk.num_keys], False)
    if plan.causal:
        count = chunk.stop - chunk.start
        is_later = torch.ones(count, count, dtype=torch.bool, device=bias_BHMS.device).triu(1).flip(0)
        bias_BHMS[..., chunk.num_keys - count :].masked_fill_(is_later, torch.finfo(bias_BHMS.dtype).min)
    return bias_BHMS


def _weights(
    plan: ChunkPlan, chunk: Chunk, query: torch.Tensor, key: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(B, H, M, S): the attention weights in float32 or wider, and the factors that dropout multiplies them by."""
    q, k = query[:, chunk.heads, chunk.queries], chunk.expand_keys(key)
    wide = torch.promote_types(query.dtype, torch.float32)  # the lowest float16 plus a negative logit would be -inf
    logits = q.matmul(k.transpose(-1, -2)).to(wide).mul_(plan.scaling)
    for block in plan.score_blocks:
        block.write(logits, chunk, overwrite=False)
    weights = torch.softmax(_apply_mask(plan, chunk, logits), dim=-1)
    if not plan.dropout:
        return weights, None
    generator = torch.Generator(query.device).manual_seed(plan.seed + chunk.heads.start * query.shape[2] + chunk.start)
    keep = torch.empty_like(weights).bernoulli_(1 - plan.dropout, generator=generator)
    return weights, keep.div_(max(1 - plan.dropout, torch.finfo(keep.dtype).eps))  # with dropout=1, zeros stay zeros


def _weighted_values(plan: ChunkPlan, chunk: Chunk, weights: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """(B, H, M, D): the weighted sum of the values and of the vectors added to them."""
    v = chunk.expand_keys(value)
    output = weights.to(v.dtype).matmul(v)
    for block in plan.value_blocks:
        block.add_output(output, weights, chunk)
    return output


class _ChunkedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, plan: ChunkPlan, forward: ForwardPass, *tensors: torch.Tensor) -> torch.Tensor:
        # Detached, because SDPA makes a dense copy of a mask that requires a gradient.
        query, key, value, *block_tensors = (tensor.detach() for tensor in tensors)
        output_BQHD = forward(plan.with_tensors(block_tensors), query, key, value)
        ctx.save_for_backward(output_BQHD, *tensors)
        ctx.plan = plan
        return output_BQHD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_output_BQHD: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        output_BQHD, *tensors = ctx.saved_tensors
        query, key, value, *block_tensors = tensors
        plan: ChunkPlan = ctx.plan.with_tensors(block_tensors)
        wide = torch.promote_types(query.dtype, torch.float32)
        grads = [torch.zeros_like(tensor, dtype=torch.promote_types(tensor.dtype, wide)) for tensor in tensors]
        d_query, d_key, d_value = grads[:3]
        block_grads, needs_grad = plan.split(grads[3:]), plan.split(ctx.needs_input_grad[5:])
        trained = [
            (block, block_grad)
            for block, block_grad, needs in zip(plan.score_blocks, block_grads, needs_grad, strict=False)
            if any(needs)
        ]
        value_grads = block_grads[len(plan.score_blocks) :]
        d_output, output = d_output_BQHD.transpose(1, 2), output_BQHD.transpose(1, 2)
        for chunk in iter_chunks(query, key, plan.causal, plan.weights_chunk):
            q, d_o, o = (states[:, chunk.heads, chunk.queries] for states in (query, d_output, output))
            k, v = chunk.expand_keys(key), chunk.expand_keys(value)
            weights, keep = _weights(plan, chunk, query, key)
            dropped = weights if keep is None else weights * keep
            chunk.add_to_keys(d_value, dropped.to(d_o.dtype).transpose(-1, -2).matmul(d_o))
            d_weights = d_o.matmul(v.transpose(-1, -2)).to(wide)
            for value_block, value_grad in zip(plan.value_blocks, value_grads, strict=True):
                value_block.accumulate_grad(d_o, dropped, chunk, d_weights, value_grad)
            if keep is not None:
                d_weights.mul_(keep)
            # The mean in the softmax gradient, from the output unless that was rounded to a narrow dtype.
            mean = (d_o * o if wide is query.dtype else d_weights * weights).sum(-1, keepdim=True)
            d_logits = d_weights.sub_(mean).mul_(weights)
            for block, block_grad in trained:
                block.accumulate_grad(d_logits, chunk, block_grad)
            d_scaled = d_logits.mul_(plan.scaling).to(q.dtype)
            d_query[:, chunk.heads, chunk.queries] = d_scaled.matmul(k).to(wide)
            chunk.add_to_keys(d_key, d_scaled.transpose(-1, -2).matmul(q))
        return None, None, *(grad.to(tensor.dtype) for grad, tensor in zip(grads, tensors, strict=True))
