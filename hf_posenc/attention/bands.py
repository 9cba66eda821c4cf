"""Products of states with one vector per distance, aligned by strided views instead of lookups.

Queries are numbered backwards from the last one, so that query t and key j are at distance index t + j: a function of
the sum of row and column, whichever of the two is the row. A tile of M rows and C columns meets M + C - 1 distances.
The product of its rows with the vectors of all these distances is a block in which each row's columns start one
element further right than those of the row above; reading it with a row stride one larger aligns them ("skewing").
That is a view, where a gather would walk slowly through memory. Beyond some distance on either side, all vectors are
often equal (clipped distances): one product per row is enough there.

Shape legend: B batch, H heads, M rows of a tile, C columns, D head size, N near distances, W those in a window.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch

TILE_ROWS = 128
"""Tuned on CPU: few enough that a block is hardly wider than its columns, enough for an efficient matmul."""


@dataclasses.dataclass(frozen=True)
class DistanceVectors:
    """One vector per distance index."""

    near_HND: torch.Tensor
    """(H or 1, N, D). The first and the last are repeated `TILE_ROWS` times, so that windows can reach past them."""
    first: int
    """The first distance index that is near: all below it share its vector, as all above the last one share that."""

    @classmethod
    def from_table(cls, rows_HRD: torch.Tensor, index_L: torch.Tensor, dtype: torch.dtype) -> DistanceVectors:
        changes = (index_L[1:] != index_L[:-1]).nonzero().flatten()
        first, last = (int(changes[0]), int(changes[-1]) + 1) if len(changes) else (0, 0)
        near_N = torch.arange(first - TILE_ROWS, last + TILE_ROWS + 1, device=index_L.device).clamp(first, last)
        # All far distances share a row, whose gradient is a long sum: look it up in float32 at least, narrow after.
        rows_HRD = rows_HRD.to(torch.promote_types(rows_HRD.dtype, torch.float32))
        return cls(rows_HRD.index_select(1, index_L[near_N]).to(dtype), first)

    @property
    def last(self) -> int:
        return self.first + self.near_HND.shape[1] - 2 * TILE_ROWS - 1

    def far_products(self, states_BHMD: torch.Tensor, heads: slice) -> torch.Tensor:
        """(B, H, M, 2): the products with the vector of all far distances on either side."""
        far_H2D = self.near_HND[:, :: self.near_HND.shape[1] - 1]
        return states_BHMD.matmul((far_H2D if far_H2D.shape[0] == 1 else far_H2D[heads]).transpose(-1, -2))


class Tile:
    """Consecutive rows and columns: the columns that are near any of the rows, and the vectors between the two."""

    def __init__(self, vectors: DistanceVectors, heads: slice, rows: tuple[int, int], columns: tuple[int, int]) -> None:
        start, stop = columns
        near_start = min(max(vectors.first - rows[1] + 2, start), stop)
        near_stop = min(max(vectors.last - rows[0], near_start), stop)
        offset = TILE_ROWS - vectors.first
        self.near = slice(near_start - start, near_stop - start)
        self.far = [(0, slice(0, near_start - start))] if near_start > start else []
        """Far columns, each with the index of their vector: 0 for the first, -1 for the last."""
        if near_stop < stop:
            self.far.append((-1, slice(near_stop - start, stop - start)))
        self.window = slice(rows[0] + near_start + offset, rows[1] + near_stop - 1 + offset)
        self.heads = heads if vectors.near_HND.shape[0] > 1 else slice(0, 1)
        self.vectors_HND = vectors.near_HND[self.heads]

    @property
    def has_near(self) -> bool:
        return self.near.start < self.near.stop

    def flatten(self, states_HBMX: torch.Tensor) -> torch.Tensor:
        """(H or 1, all that share vectors, X): one matmul for the whole batch."""
        return states_HBMX.reshape(self.vectors_HND.shape[0], -1, states_HBMX.shape[-1])

    def write_products(
        self, out_BHMC: torch.Tensor, states_BHMD: torch.Tensor, far_BHM2: torch.Tensor | None, overwrite: bool
    ) -> None:
        """Write, or add, the product of each row's state with the vector at each column's distance."""
        write = torch.Tensor.copy_ if overwrite else torch.Tensor.add_
        for side, columns in self.far:
            assert far_BHM2 is not None
            write(out_BHMC[..., columns], far_BHM2[..., side, None])
        if self.has_near:
            states_HBMD = states_BHMD.transpose(0, 1)
            block = self.flatten(states_HBMD).matmul(self.vectors_HND[:, self.window].transpose(-1, -2))
            block_HBMW = block.view(*states_HBMD.shape[:3], -1)
            write(out_BHMC[..., self.near], _unskewed_view(block_HBMW, self.near.stop - self.near.start))


def iter_tiles(
    vectors: DistanceVectors, heads: slice, rows: tuple[int, int], columns: tuple[int, int]
) -> Iterator[tuple[Tile, slice]]:
    """Tiles of at most `TILE_ROWS` rows, each with its rows relative to the first one."""
    for start in range(rows[0], rows[1], TILE_ROWS):
        stop = min(start + TILE_ROWS, rows[1])
        yield Tile(vectors, heads, (start, stop), columns), slice(start - rows[0], stop - rows[0])


def _unskewed_view(block_HBMW: torch.Tensor, num_columns: int) -> torch.Tensor:
    """(B, H, M, C): the view of a block by distance that has each column in its place."""
    heads, batch, rows, width = block_HBMW.shape
    head_stride, batch_stride, _, _ = block_HBMW.stride()
    return block_HBMW.as_strided((batch, heads, rows, num_columns), (batch_stride, head_stride, width + 1, 1))


def skew(values_BHMC: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """(H, B, M, M + C - 1): each value in the column of its distance, zeros elsewhere."""
    batch, heads, rows, columns = values_BHMC.shape
    block_HBMW = values_BHMC.new_zeros(heads, batch, rows, columns + rows - 1, dtype=dtype)
    _unskewed_view(block_HBMW, columns).copy_(values_BHMC)
    return block_HBMW


class SkewedTile:
    """The values of a tile arranged by distance, so that their sums with vectors are matmuls."""

    def __init__(self, values_BHMC: torch.Tensor, tile: Tile, dtype: torch.dtype) -> None:
        self.tile = tile
        self.far = [(side, values_BHMC[..., columns].sum(-1, keepdim=True).to(dtype)) for side, columns in tile.far]
        self.near_HBMW = skew(values_BHMC[..., tile.near], dtype) if tile.has_near else None

    def weighted_vectors(self) -> torch.Tensor:
        """(B, H, M, D): per row, the sum of its columns' vectors times the values."""
        vectors_HND = self.tile.vectors_HND
        products = [values * vectors_HND[:, side, None] for side, values in self.far]
        if self.near_HBMW is not None:
            near = self.tile.flatten(self.near_HBMW).matmul(vectors_HND[:, self.tile.window])
            products.append(near.view(*self.near_HBMW.shape[:3], -1).transpose(0, 1))
        return sum(products[1:], start=products[0])

    def add_weighted_states(self, out_HND: torch.Tensor, states_BHMD: torch.Tensor) -> None:
        """Add to each vector the sum of the states of the rows it meets, times the values."""
        out_HND, states_HBMD = out_HND[self.tile.heads], states_BHMD.transpose(0, 1)
        for side, values in self.far:
            out_HND[:, side] += self.tile.flatten(values.transpose(0, 1) * states_HBMD).sum(1)
        if self.near_HBMW is not None:
            near, states = self.tile.flatten(self.near_HBMW), self.tile.flatten(states_HBMD)
            out_HND[:, self.tile.window] += near.transpose(-1, -2).matmul(states)


def products_by_distance(states_BHQD: torch.Tensor, rows_HLD: torch.Tensor, num_keys: int) -> torch.Tensor:
    """(B, H, Q, K): at i, j the product of state i with row j - i + Q - 1. Dense, and differentiable by autograd."""
    num_queries, tiles = states_BHQD.shape[2], []
    for start in range(0, num_queries, TILE_ROWS):
        states = states_BHQD[:, :, start : start + TILE_ROWS]
        first = num_queries - start - states.shape[2]
        window = rows_HLD[:, first : first + num_keys + states.shape[2] - 1]
        block_HBMW = states.flip(2).matmul(window.transpose(-1, -2)).transpose(0, 1).contiguous()
        tiles.append(_unskewed_view(block_HBMW, num_keys).flip(2))
    return tiles[0] if len(tiles) == 1 else torch.cat(tiles, dim=2)


def key_products_by_distance(key_BHKD: torch.Tensor, rows_HLD: torch.Tensor, num_queries: int) -> torch.Tensor:
    """(B, H, Q, K): at i, j the product of key j with row j - i + Q - 1."""
    if num_queries == 1:  # each key meets one row
        return (key_BHKD * rows_HLD).sum(-1).unsqueeze(2)
    return products_by_distance(key_BHKD, rows_HLD.flip(1), num_queries).transpose(-1, -2)
