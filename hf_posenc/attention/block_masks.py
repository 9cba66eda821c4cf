"""flex_attention's block masks: which blocks of queries and keys it computes, and which of them need no mask inside.

They are built from what is known of documents and causality, block by block, or from a mask of all pairs that exists
already. Nothing here has a number per pair of query and key, unless such a mask is given.

Shape legend: B batch, H heads, Q queries, K keys, I blocks of queries, J blocks of keys.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch.nn.functional import pad

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

BLOCK = 128
"""Queries, and keys, per block: flex_attention's own default."""
MaskMod = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Whether a key is visible, given indices of batch, head, query and key."""


def causal_block_mask(length: int, device: torch.device) -> BlockMask:
    """Hides later keys, where there are as many keys as queries."""
    blocks = torch.arange(_num_blocks(length), device=device)
    earlier_IJ, same_IJ = blocks[:, None] > blocks, blocks[:, None] == blocks
    return _make_block_mask(same_IJ[None, None], earlier_IJ[None, None], _not_later, (length, length))


def block_mask_from_tensor(visible: torch.Tensor, batch_size: int) -> BlockMask:
    """A block mask that shows what a boolean mask shows.

    Args:
        visible: True at visible keys, (B or 1, H or 1, Q, K).
        batch_size: The number of rows that the mask is for.

    Returns:
        The block mask. It reads `visible` where a block is neither empty nor full.
    """
    num_queries, num_keys = visible.shape[-2:]
    padding = (-num_keys % BLOCK, -num_queries % BLOCK)
    padded = pad(visible, (0, padding[0], 0, padding[1])) if any(padding) else visible
    by_block = padded.unflatten(-1, (-1, BLOCK)).unflatten(-3, (-1, BLOCK))  # (B, H, I, queries, J, keys)
    any_BHIJ, full_BHIJ = by_block.any(-1).any(-2), by_block.all(-1).all(-2)
    rows = visible.expand(batch_size, -1, -1, -1)  # mask_mod is asked for every row of the batch
    if visible.shape[1] == 1:
        shared = rows[:, 0]
        mask_mod: MaskMod = lambda batch, head, q, k: shared[batch, q, k]  # noqa: E731
    else:
        mask_mod = lambda batch, head, q, k: rows[batch, head, q, k]  # noqa: E731
    return _make_block_mask(any_BHIJ & ~full_BHIJ, full_BHIJ, mask_mod, (num_queries, num_keys))


def document_block_mask(documents_BQ: torch.Tensor, real_BQ: torch.Tensor, causal: bool, num_keys: int) -> BlockMask:
    """Hides other documents of the row, padding, and if causal, later keys.

    Args:
        documents_BQ: The index of each token's document, which does not decrease along a row.
        real_BQ: False at padding.
        causal: Whether later keys are hidden.
        num_keys: The number of keys, which may include empty slots of a cache after the tokens.

    Returns:
        The block mask, with a row for each of the batch.
    """
    num_queries = documents_BQ.shape[1]
    last_B1 = documents_BQ[:, -1:]
    more = max(num_keys - num_queries, 0)
    documents_BK = torch.cat([documents_BQ, last_B1.expand(-1, more)], dim=1)
    real_BK = pad(real_BQ, (0, more))
    first_BI, last_BI = _bounds_by_block(documents_BQ)
    first_BJ, last_BJ = _bounds_by_block(documents_BK)
    real_by_block = pad(real_BK, (0, -num_keys % BLOCK)).unflatten(1, (-1, BLOCK))
    any_BIJ = (last_BI[:, :, None] >= first_BJ[:, None]) & (first_BI[:, :, None] <= last_BJ[:, None])
    any_BIJ = any_BIJ & real_by_block.any(-1)[:, None]
    full_BIJ = (first_BI[:, :, None] == last_BJ[:, None]) & (last_BI[:, :, None] == first_BJ[:, None])
    full_BIJ = full_BIJ & real_by_block.all(-1)[:, None]
    if causal:
        queries, keys = (torch.arange(bounds.shape[1], device=bounds.device) for bounds in (first_BI, first_BJ))
        any_BIJ, full_BIJ = any_BIJ & (keys <= queries[:, None]), full_BIJ & (keys < queries[:, None])

    def mask_mod(batch: torch.Tensor, head: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return (documents_BQ[batch, q] == documents_BK[batch, k]) & real_BK[batch, k]

    def causal_mask_mod(batch: torch.Tensor, head: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return mask_mod(batch, head, q, k) & (k <= q)

    partial_BHIJ, full_BHIJ = (any_BIJ & ~full_BIJ)[:, None], full_BIJ[:, None]
    chosen = causal_mask_mod if causal else mask_mod
    block_mask = _make_block_mask(partial_BHIJ, full_BHIJ, chosen, (num_queries, num_keys))
    block_mask.ndim = len(block_mask.shape)  # type: ignore[attr-defined]  # stock models ask a mask for it
    return block_mask


def _not_later(batch: torch.Tensor, head: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    return k <= q


def _num_blocks(length: int) -> int:
    return -(-length // BLOCK)


def _bounds_by_block(documents_BN: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The first and the last document of each block."""
    starts = torch.arange(0, documents_BN.shape[1], BLOCK, device=documents_BN.device)
    stops = (starts + BLOCK - 1).clamp(max=documents_BN.shape[1] - 1)
    return documents_BN[:, starts], documents_BN[:, stops]


def _make_block_mask(
    partial_BHIJ: torch.Tensor, full_BHIJ: torch.Tensor, mask_mod: MaskMod, lengths: tuple[int, int]
) -> BlockMask:
    from torch.nn.attention.flex_attention import BlockMask

    def counts_and_indices(blocks_BHIJ: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        order_BHIJ = blocks_BHIJ.int().argsort(dim=-1, descending=True, stable=True)
        return blocks_BHIJ.sum(-1, dtype=torch.int32), order_BHIJ.int().contiguous()

    return BlockMask.from_kv_blocks(
        *counts_and_indices(partial_BHIJ),
        *counts_and_indices(full_BHIJ),
        BLOCK_SIZE=BLOCK,
        mask_mod=mask_mod,
        seq_lengths=lengths,
    )
