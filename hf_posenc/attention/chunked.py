"""Attention in chunks of some heads and queries, with a backward pass of its own: the logits are never there at once.

torch's kernels have no gradient to a mask, and would write everything out for it. Here the backward pass makes the
weights of a chunk anew, as flash attention does, and hands the gradient of its logits to each term. Queries, outputs
and their gradients are in falling order here, the last one first (see `bands`).

Shape legend: B batch, H heads, G heads of keys, Q queries, M of a chunk, S keys that it sees, D width of a head.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from .blocks import Block, Chunk, KeyBlock, QueryBlock, ValueBlock, iter_chunks, make_block, make_value_block
from .call import AttentionCall
from .masks import apply_mask
from .materialize import slice_heads

QUERIES, FEW_QUERIES, COLUMNS = 1024, 256, 512
"""In a chunk: where the kernel computes it; where weights are written out, to stay in the caches; and there if queries
are the columns of a band, which is the wider for each run of them."""


@dataclasses.dataclass(frozen=True)
class ChunkPlan:
    """All of an attention but its tensors, which autograd must see and may put away until it needs them."""

    blocks: tuple[Block, ...]
    value_blocks: tuple[ValueBlock, ...]
    mask: torch.Tensor | None
    causal: bool
    scaling: float
    dropout: float
    seed: int
    """Of the dropout, so that the backward pass drops what the forward pass did."""
    dtype: torch.dtype
    """Of the sum of the terms."""

    def all_blocks(self) -> tuple[Any, ...]:
        return self.blocks + self.value_blocks

    def with_tensors(self, tensors: list[torch.Tensor]) -> ChunkPlan:
        """The same with other tensors in its blocks."""
        bound = [
            block.with_tensors(*own) for block, own in zip(self.all_blocks(), self.shared_out(tensors), strict=True)
        ]
        count = len(self.blocks)
        return dataclasses.replace(self, blocks=tuple(bound[:count]), value_blocks=tuple(bound[count:]))

    def shared_out(self, values: list[Any]) -> list[list[Any]]:
        """For each block, as many of the values as it has tensors."""
        left = iter(values)
        return [[next(left) for _ in block.tensors] for block in self.all_blocks()]

    @property
    def needs_weights(self) -> bool:
        """Whether weights must be in hand in the forward pass, as they must be in the backward pass."""
        return bool(self.dropout or self.value_blocks)

    @property
    def size_by_hand(self) -> int:
        return COLUMNS if any(isinstance(block, KeyBlock) for block in self.blocks) else FEW_QUERIES

    @classmethod
    def of(cls, call: AttentionCall) -> ChunkPlan:
        blocks = [make_block(term, call) for term in call.terms]
        # The first one is written, the others are added to it: by query is the order they are written in.
        blocks.sort(key=lambda block: not isinstance(block, QueryBlock))
        values = [make_value_block(rows, call) for rows in call.value_rows]
        return cls(
            blocks=tuple(blocks),
            value_blocks=tuple(values),
            mask=call.attention_mask,
            causal=call.causal,
            scaling=call.scaling,
            dropout=call.dropout,
            seed=int(torch.randint(2**62, ())) if call.dropout else 0,
            dtype=call.positions.dtype,
        )


Forward = Callable[..., torch.Tensor]


def chunked_attention(call: AttentionCall) -> torch.Tensor:
    """(B, Q, H, D), queries as they came: any terms where positions are uniform, and vectors that join the values."""

    def forward(plan: ChunkPlan, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        output_BQHD = query.new_empty(query.shape[0], query.shape[2], query.shape[1], value.shape[-1])
        room = None if plan.needs_weights else Room(plan, query, key)
        for chunk in iter_chunks(query, key, plan.causal, plan.size_by_hand if plan.needs_weights else QUERIES):
            own = output_BQHD[:, chunk.queries, chunk.heads]
            if room is None:
                weights, kept = _weights(plan, chunk, query, key)
                own.copy_(_weighted(plan, chunk, weights if kept is None else weights * kept, value).transpose(1, 2))
            else:
                q, k, v = query[:, chunk.heads, chunk.queries], key[:, chunk.groups], value[:, chunk.groups]
                mask = _masked(plan, chunk, _bias(plan, chunk, room).to(query.dtype))
                own.copy_(call.run_stock(q, k[:, :, : chunk.seen], v[:, :, : chunk.seen], mask)[0])
        return output_BQHD

    return _attend(call, ChunkPlan.of(call), forward)


def attention_with_chunked_backward(call: AttentionCall, forward: Forward) -> torch.Tensor:
    """(B, Q, H, D): with a forward pass of the caller's, in falling order; for a term of the distance, no dropout."""
    return _attend(call, ChunkPlan.of(call), forward)


def _attend(call: AttentionCall, plan: ChunkPlan, forward: Forward) -> torch.Tensor:
    own = [tensor for block in plan.all_blocks() for tensor in block.tensors]
    tensors = [call.query.flip(2), call.key, call.value, *own]
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        bare = plan.with_tensors([tensor.new_empty(0) for tensor in own])
        return _ByChunks.apply(bare, forward, *tensors).flip(1)
    return forward(plan, *tensors[:3]).flip(1)


class Room:
    """Memory for the terms of a chunk, which every chunk uses again: fresh pages cost more than what is put there."""

    def __init__(self, plan: ChunkPlan, query: torch.Tensor, key: torch.Tensor) -> None:
        self._batch = max(block.batch for block in plan.blocks)
        largest = max(
            (chunk.heads.stop - chunk.heads.start) * (chunk.stop - chunk.start) * chunk.seen
            for chunk in iter_chunks(query, key, plan.causal, QUERIES)
        )
        self._memory = query.new_empty(self._batch * largest, dtype=plan.dtype)

    def of(self, chunk: Chunk) -> torch.Tensor:
        """(B or 1, H, M, S)."""
        size = (self._batch, chunk.heads.stop - chunk.heads.start, chunk.stop - chunk.start, chunk.seen)
        return self._memory[: math.prod(size)].view(size)


def _bias(plan: ChunkPlan, chunk: Chunk, room: Room) -> torch.Tensor:
    """(B or 1, H, M, S): the sum of the terms."""
    total_BHMS = room.of(chunk)
    for number, block in enumerate(plan.blocks):
        block.put(total_BHMS, chunk, fresh=number == 0)
    return total_BHMS


def _masked(plan: ChunkPlan, chunk: Chunk, bias_BHMS: torch.Tensor) -> torch.Tensor:
    """With what the chunk's queries must not see hidden."""
    if plan.mask is not None:
        mask, count = slice_heads(plan.mask, 1, chunk.heads), plan.mask.shape[-2]
        mask = mask if count == 1 else mask[..., count - chunk.stop : count - chunk.start, :].flip(-2)
        return apply_mask(bias_BHMS, mask[..., : chunk.seen], False)
    if plan.causal:
        count = chunk.stop - chunk.start
        ahead = torch.ones(count, count, dtype=torch.bool, device=bias_BHMS.device).triu(1).flip(0)
        bias_BHMS[..., chunk.seen - count :].masked_fill_(ahead, torch.finfo(bias_BHMS.dtype).min)
    return bias_BHMS


def _weights(
    plan: ChunkPlan, chunk: Chunk, query: torch.Tensor, key: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(B, H, M, S) in a wide dtype, and what dropout multiplies them by."""
    q, k = query[:, chunk.heads, chunk.queries], chunk.for_heads(key)
    wide = torch.promote_types(query.dtype, torch.float32)  # the lowest float16 and a logit would be -inf together
    logits = q.matmul(k.transpose(-1, -2)).to(wide).mul_(plan.scaling)
    for block in plan.blocks:
        block.put(logits, chunk, fresh=False)
    weights = torch.softmax(_masked(plan, chunk, logits), dim=-1)
    if not plan.dropout:
        return weights, None
    generator = torch.Generator(query.device).manual_seed(plan.seed + chunk.heads.start * query.shape[2] + chunk.start)
    kept = torch.empty_like(weights).bernoulli_(1 - plan.dropout, generator=generator)
    return weights, kept.div_(max(1 - plan.dropout, torch.finfo(kept.dtype).eps))  # of all dropped, zeros are left


def _weighted(plan: ChunkPlan, chunk: Chunk, weights: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """(B, H, M, D): values, and the vectors that join them."""
    v = chunk.for_heads(value)
    output = weights.to(v.dtype).matmul(v)
    for block in plan.value_blocks:
        block.add_weighted(output, weights, chunk)
    return output


class _ByChunks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, plan: ChunkPlan, forward: Forward, *tensors: torch.Tensor) -> torch.Tensor:
        bare = [tensor.detach() for tensor in tensors]  # of a mask that wants a gradient, SDPA writes out everything
        output_BQHD = forward(plan.with_tensors(bare[3:]), *bare[:3])
        ctx.save_for_backward(output_BQHD, *tensors)
        ctx.plan = plan
        return output_BQHD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BQHD: torch.Tensor) -> Any:
        output_BQHD, *tensors = ctx.saved_tensors
        query, key, value, *own = tensors
        plan: ChunkPlan = ctx.plan.with_tensors(own)
        wide = torch.promote_types(query.dtype, torch.float32)
        sums = [torch.zeros_like(tensor, dtype=torch.promote_types(tensor.dtype, wide)) for tensor in tensors]
        d_query, d_key, d_value, *d_own = sums
        of_blocks, wanted = plan.shared_out(d_own), plan.shared_out(list(ctx.needs_input_grad[5:]))
        trained = [(block, to) for block, to, asked in zip(plan.blocks, of_blocks, wanted, strict=False) if any(asked)]
        of_values = of_blocks[len(plan.blocks) :]
        grad, output = grad_BQHD.transpose(1, 2), output_BQHD.transpose(1, 2)
        for chunk in iter_chunks(query, key, plan.causal, plan.size_by_hand):
            q, g, o = (states[:, chunk.heads, chunk.queries] for states in (query, grad, output))
            k, v = chunk.for_heads(key), chunk.for_heads(value)
            weights, kept = _weights(plan, chunk, query, key)
            given = weights if kept is None else weights * kept
            chunk.add_by_group(d_value, given.to(g.dtype).transpose(-1, -2).matmul(g))
            d_weights = g.matmul(v.transpose(-1, -2)).to(wide)
            for value_block, found in zip(plan.value_blocks, of_values, strict=True):
                value_block.accumulate_grad(g, given, chunk, d_weights, found)
            if kept is not None:
                d_weights.mul_(kept)
            # The mean that a softmax takes off: from the output, unless that was rounded to something narrow.
            mean = (g * o if wide is query.dtype else d_weights * weights).sum(-1, keepdim=True)
            d_logits = d_weights.sub_(mean).mul_(weights)
            for block, found in trained:
                block.accumulate_grad(d_logits, chunk, found)
            d_scaled = d_logits.mul_(plan.scaling).to(q.dtype)
            d_query[:, chunk.heads, chunk.queries] = d_scaled.matmul(k).to(wide)
            chunk.add_by_group(d_key, d_scaled.transpose(-1, -2).matmul(q))
        return None, None, *(found.to(tensor.dtype) for found, tensor in zip(sums, tensors, strict=True))
