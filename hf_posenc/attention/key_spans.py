"""Masks in which the keys that a query sees are neighbours: two numbers per query instead of one per pair.

Causal attention, padding at the ends of rows, documents that share a row, and sliding windows are such masks.

Shape legend: B batch, H heads, Q queries, K keys, I tiles of queries, J tiles of keys.
"""

from __future__ import annotations

import dataclasses

import torch
from torch.nn.functional import pad

CHUNK = 2**24
"""Entries of a mask that are read at a time."""


@dataclasses.dataclass(eq=False)
class KeySpans:
    """The keys that each query of each row sees: from a first one up to, but not including, another."""

    spans_BQ2: torch.Tensor
    """int32, contiguous. Both numbers are zero for queries that see nothing."""
    num_keys: int
    _ranges: dict[tuple[int, int], torch.Tensor] = dataclasses.field(default_factory=dict)

    def query_ranges(self, block_q: int, block_k: int) -> torch.Tensor:
        """Which queries to visit for each tile of keys: the others see none of them.

        Args:
            block_q: The number of queries per tile.
            block_k: The number of keys per tile.

        Returns:
            The first query, which starts a tile, and the end: (B, J, 2), int32, contiguous.
        """
        if (block_q, block_k) not in self._ranges:
            self._ranges[block_q, block_k] = self._query_ranges(block_q, block_k)
        return self._ranges[block_q, block_k]

    def _query_ranges(self, block_q: int, block_k: int) -> torch.Tensor:
        num_queries = self.spans_BQ2.shape[1]
        first_BQ, stop_BQ = self.spans_BQ2.unbind(-1)
        first_BQ = first_BQ.masked_fill(first_BQ >= stop_BQ, self.num_keys)
        padding = (0, -num_queries % block_q)
        lowest_BI = pad(first_BQ, padding, value=self.num_keys).unflatten(1, (-1, block_q)).amin(-1)
        highest_BI = pad(stop_BQ, padding).unflatten(1, (-1, block_q)).amax(-1)
        starts_J = torch.arange(0, self.num_keys, block_k, device=first_BQ.device, dtype=torch.int32)
        seen_BJI = (lowest_BI[:, None] < starts_J[:, None] + block_k) & (highest_BI[:, None] > starts_J[:, None])
        tiles_I = torch.arange(lowest_BI.shape[1], device=first_BQ.device, dtype=torch.int32)
        begin_BJ = torch.where(seen_BJI, tiles_I, tiles_I.shape[0]).amin(-1) * block_q
        end_BJ = (torch.where(seen_BJI, tiles_I + 1, 0).amax(-1) * block_q).clamp(max=num_queries)
        return torch.stack([begin_BJ, end_BJ], dim=-1).to(torch.int32).contiguous()


def spans_from_mask(visible: torch.Tensor, batch_size: int) -> KeySpans | None:
    """The spans of a boolean mask.

    Waits for the device of the mask.

    Args:
        visible: True at visible keys, (B or 1, 1, Q, K).
        batch_size: The number of rows that the mask is for.

    Returns:
        The spans, or None if some query sees keys with hidden ones between them.
    """
    num_queries, num_keys = visible.shape[-2:]
    spans, gaps = [], []
    for rows_BMK in visible[:, 0].split(max(CHUNK // max(visible.shape[0] * num_keys, 1), 1), dim=1):
        count_BM = rows_BMK.sum(-1, dtype=torch.int32)
        as_numbers = rows_BMK.to(torch.uint8)
        first_BM = as_numbers.argmax(-1).to(torch.int32)
        last_BM = num_keys - 1 - as_numbers.flip(-1).argmax(-1).to(torch.int32)
        is_empty = count_BM == 0
        gaps.append(((last_BM - first_BM + 1 != count_BM) & ~is_empty).any())
        spans.append(torch.stack([first_BM, last_BM + 1], dim=-1).masked_fill(is_empty[..., None], 0))
    if num_queries and bool(torch.stack(gaps).any()):
        return None
    spans_BQ2 = torch.cat(spans, dim=1).expand(batch_size, -1, -1).contiguous()
    return KeySpans(spans_BQ2, num_keys)
