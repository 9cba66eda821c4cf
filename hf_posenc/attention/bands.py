"""Products with a vector for each distance, laid out by rows and columns without looking anything up.

Queries are counted from the last one on, so that query t and key j are at distance number t + j: a function of the sum
of row and column, whichever of the two is called the row. For a run of m rows and C columns, C + m - 1 numbers occur.
The products of the run with their vectors are a block in which each row's columns lie one further right than the last
row's: reading it with a row stride of one more puts them in place. That is a view, where gathering would be a slow
walk through memory. From some distance on, on either side, vectors are often all the same: there, one product does.

Shape legend: B batch, H heads, M rows of a run, C columns, D width of a head, N near distances, W those in a window.
"""

from __future__ import annotations

import dataclasses

import torch

RUN = 128
"""Rows at a time: few enough that a block is little wider than its columns, enough that its product is a good one."""


@dataclasses.dataclass(frozen=True)
class Vectors:
    """A vector for each distance number."""

    near_HND: torch.Tensor
    """(H or 1, N, D): the first and the last `margin` are equal, so that windows can reach beyond the near ones."""
    first: int
    """The number of the first one behind the margin. All before it have the same, as have all behind the last."""
    margin: int

    @classmethod
    def of_table(cls, rows_HRD: torch.Tensor, index_L: torch.Tensor, dtype: torch.dtype) -> Vectors:
        """From a table and the row in it of each distance number.

        All far distances share a row, whose gradient is a long sum: wide when it is looked up, and narrow after that.
        """
        changes = (index_L[1:] != index_L[:-1]).nonzero().flatten()
        first, last = (int(changes[0]), int(changes[-1]) + 1) if len(changes) else (0, 0)
        places = torch.arange(first - RUN, last + RUN + 1, device=index_L.device).clamp(first, last)
        wide_HRD = rows_HRD.to(torch.promote_types(rows_HRD.dtype, torch.float32))
        return cls(wide_HRD.index_select(1, index_L[places]).to(dtype), first, RUN)

    @property
    def last(self) -> int:
        return self.first + self.near_HND.shape[1] - 2 * self.margin - 1


class Run:
    """Some consecutive rows and columns: which columns are near any of the rows, and the vectors between those two."""

    def __init__(self, vectors: Vectors, heads: slice, rows: tuple[int, int], columns: tuple[int, int]) -> None:
        start, stop = columns
        left = min(max(vectors.first - rows[1] + 2, start), stop)
        right = min(max(vectors.last - rows[0], left), stop)
        offset = vectors.margin - vectors.first
        self.near = slice(left - start, right - start)
        self.far = [(0, slice(0, left - start))] if left > start else []
        if right < stop:
            self.far.append((-1, slice(right - start, stop - start)))
        self.window = slice(rows[0] + left + offset, rows[1] + right - 1 + offset)
        self.heads = heads if vectors.near_HND.shape[0] > 1 else slice(0, 1)
        self.vectors_HND = vectors.near_HND[self.heads]

    @property
    def has_near(self) -> bool:
        return self.near.start < self.near.stop

    def flat(self, states_HBMX: torch.Tensor) -> torch.Tensor:
        """(H or 1, all that share a vector, X): one product for the whole batch."""
        return states_HBMX.reshape(self.vectors_HND.shape[0], -1, states_HBMX.shape[-1])


def _in_place(block_HBMW: torch.Tensor, num_columns: int) -> torch.Tensor:
    """(B, H, M, C): the view of a block by distances that has each column where it belongs."""
    heads, batch, rows, width = block_HBMW.shape
    by_head, by_batch, _, _ = block_HBMW.stride()
    size, strides = (batch, heads, rows, num_columns), (by_batch, by_head, width + 1, 1)
    return block_HBMW.as_strided(size, strides)


def products_with_ends(states_BHQD: torch.Tensor, vectors: Vectors, heads: slice) -> torch.Tensor:
    """(B, H, Q, 2): with the vector of everything far on the one side, and on the other."""
    ends = vectors.near_HND[:, :: vectors.near_HND.shape[1] - 1]
    return states_BHQD.matmul((ends if ends.shape[0] == 1 else ends[heads]).transpose(-1, -2))


def write_products(
    into_BHMC: torch.Tensor, states_BHMD: torch.Tensor, with_ends_BHM2: torch.Tensor | None, run: Run, fresh: bool
) -> None:
    """At each row and column the product of the row's state and the distance's vector: written if fresh, else added."""
    put = torch.Tensor.copy_ if fresh else torch.Tensor.add_
    for end, columns in run.far:
        assert with_ends_BHM2 is not None
        put(into_BHMC[..., columns], with_ends_BHM2[..., end, None])
    if run.has_near:
        states_HBMD = states_BHMD.transpose(0, 1)
        block = run.flat(states_HBMD).matmul(run.vectors_HND[:, run.window].transpose(-1, -2))
        block_HBMW = block.view(*states_HBMD.shape[:3], -1)
        put(into_BHMC[..., run.near], _in_place(block_HBMW, run.near.stop - run.near.start))


def layout_by_distance(values_BHMC: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """(H, B, M, M + C - 1): each value in the column of its distance, and zeros elsewhere."""
    batch, heads, rows, columns = values_BHMC.shape
    block_HBMW = values_BHMC.new_zeros(heads, batch, rows, columns + rows - 1, dtype=dtype)
    _in_place(block_HBMW, columns).copy_(values_BHMC)
    return block_HBMW


class DistanceLayout:
    """Something of rows and columns, laid by distance instead: its sums with vectors are products then."""

    def __init__(self, values_BHMC: torch.Tensor, run: Run, dtype: torch.dtype) -> None:
        self.run = run
        self.far = [(end, values_BHMC[..., columns].sum(-1, keepdim=True).to(dtype)) for end, columns in run.far]
        self.band_HBMW = layout_by_distance(values_BHMC[..., run.near], dtype) if run.has_near else None

    def sums_of_vectors(self) -> torch.Tensor:
        """(B, H, M, D): for each row, the vectors of its columns times the values."""
        vectors = self.run.vectors_HND
        parts = [sums * vectors[:, end, None] for end, sums in self.far]
        if self.band_HBMW is not None:
            product = self.run.flat(self.band_HBMW).matmul(vectors[:, self.run.window])
            parts.append(product.view(*self.band_HBMW.shape[:3], -1).transpose(0, 1))
        return sum(parts[1:], start=parts[0])

    def add_sums_of_states(self, sums_HND: torch.Tensor, states_BHMD: torch.Tensor) -> None:
        """To each vector, the states of the rows it meets times the values."""
        own, states_HBMD = sums_HND[self.run.heads], states_BHMD.transpose(0, 1)
        for end, sums in self.far:
            own[:, end] += self.run.flat(sums.transpose(0, 1) * states_HBMD).sum(1)
        if self.band_HBMW is not None:
            band, states = self.run.flat(self.band_HBMW), self.run.flat(states_HBMD)
            own[:, self.run.window] += band.transpose(-1, -2).matmul(states)


def products_by_distance(states_BHQD: torch.Tensor, rows_HLD: torch.Tensor, num_keys: int) -> torch.Tensor:
    """(B, H, Q, K): at i, j the product of state i and row j - i + Q - 1. Written out, for autograd."""
    num_queries, found = states_BHQD.shape[2], []
    for start in range(0, num_queries, RUN):
        run = states_BHQD[:, :, start : start + RUN]
        first = num_queries - start - run.shape[2]
        window = rows_HLD[:, first : first + num_keys + run.shape[2] - 1]
        block_HBMW = run.flip(2).matmul(window.transpose(-1, -2)).transpose(0, 1).contiguous()
        found.append(_in_place(block_HBMW, num_keys).flip(2))
    return found[0] if len(found) == 1 else torch.cat(found, dim=2)


def products_of_keys_by_distance(key_BHKD: torch.Tensor, rows_HLD: torch.Tensor, num_queries: int) -> torch.Tensor:
    """(B, H, Q, K): at i, j the product of key j and row j - i + Q - 1."""
    if num_queries == 1:  # each key meets one row
        return (key_BHKD * rows_HLD).sum(-1).unsqueeze(2)
    return products_by_distance(key_BHKD, rows_HLD.flip(1), num_queries).transpose(-1, -2)
