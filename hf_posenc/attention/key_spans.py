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
    _made: dict[tuple[str, int, int], torch.Tensor] = dataclasses.field(default_factory=dict)

    def query_ranges(self, block_q: int, block_k: int) -> torch.Tensor:
        """Which queries to visit for each tile of keys: the others see none of them.

        Args:
            block_q: The number of queries per tile.
            block_k: The number of keys per tile.

        Returns:
            The first query, which starts a tile, and the end: (B, J, 2), int32, contiguous.
        """
        name = ("queries", block_q, block_k)
        if name not in self._made:
            ranges_BJ2 = _bounds(self._seen_tiles(block_q, block_k).transpose(1, 2)) * block_q
            self._made[name] = ranges_BJ2.clamp(max=self.spans_BQ2.shape[1])
        return self._made[name]

    def band_ranges(self, block: int) -> torch.Tensor:
        """Which tiles of queries to visit for each band of square tiles: in the others, no key is seen.

        In band c, tile i of the queries meets tile i + c - (I - 1) of the keys.

        Args:
            block: The number of queries, and of keys, per tile.

        Returns:
            The first tile and the end: (B, I + J - 1, 2), int32, contiguous.
        """
        name = ("bands", block, block)
        if name not in self._made:
            seen_BIJ = self._seen_tiles(block, block)
            num_query_tiles, num_key_tiles = seen_BIJ.shape[1:]
            bands = torch.arange(num_query_tiles + num_key_tiles - 1, device=seen_BIJ.device)[:, None]
            tiles = torch.arange(num_query_tiles, device=seen_BIJ.device)
            key_tiles_CI = tiles + bands - (num_query_tiles - 1)
            exists_CI = (key_tiles_CI >= 0) & (key_tiles_CI < num_key_tiles)
            seen_BCI = seen_BIJ[:, tiles, key_tiles_CI.clamp(0, num_key_tiles - 1)] & exists_CI
            self._made[name] = _bounds(seen_BCI)
        return self._made[name]

    def _seen_tiles(self, block_q: int, block_k: int) -> torch.Tensor:
        """(B, I, J): False where no query of a tile sees a key of the other."""
        first_BQ, stop_BQ = self.spans_BQ2.unbind(-1)
        first_BQ = first_BQ.masked_fill(first_BQ >= stop_BQ, self.num_keys)
        padding = (0, -first_BQ.shape[1] % block_q)
        lowest_BI = pad(first_BQ, padding, value=self.num_keys).unflatten(1, (-1, block_q)).amin(-1)
        highest_BI = pad(stop_BQ, padding).unflatten(1, (-1, block_q)).amax(-1)
        starts_J = torch.arange(0, self.num_keys, block_k, device=first_BQ.device)
        seen_BIJ: torch.Tensor = (lowest_BI[..., None] < starts_J + block_k) & (highest_BI[..., None] > starts_J)
        return seen_BIJ


def _bounds(flags: torch.Tensor) -> torch.Tensor:
    """(..., 2): the first True along the last axis, and the end of the last one; the end is zero if there is none."""
    indices = torch.arange(flags.shape[-1], device=flags.device)
    begin = torch.where(flags, indices, flags.shape[-1]).amin(-1)
    end = torch.where(flags, indices + 1, 0).amax(-1)
    return torch.stack([begin, end], dim=-1).to(torch.int32).contiguous()


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
