"""Products with a vector for each distance, laid out by query and key without looking anything up.

For a run of m queries and all keys, K + m - 1 distances occur. The products of the run with their rows are a block in
which each query's keys lie one column further left than the last query's: reading it with a row stride of one less
puts them in place. That is a view, where gathering them would be a slow walk through memory.

Shape legend: B batch, H heads, Q queries, K keys, D width of a head, L = Q + K - 1 distances.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

RUN = 128
"""Queries at a time: few enough that a block is little wider than the keys, enough that its product is a good one."""


def runs(states_BHQD: torch.Tensor, rows_HLD: torch.Tensor, num_keys: int) -> Iterator[tuple[int, torch.Tensor]]:
    """For each run of queries its first and (B, H, m, K): at i, j the product of state i and row j - i + Q - 1.

    Rows are (H or 1, L, D).
    """
    num_queries = states_BHQD.shape[2]
    across_HDL = rows_HLD.transpose(-1, -2)
    for start in range(0, num_queries, RUN):
        run = states_BHQD[:, :, start : start + RUN]
        length = run.shape[2]
        width = num_keys + length - 1
        first = num_queries - start - length
        block = run.matmul(across_HDL[..., first : first + width]).contiguous()
        size = (*block.shape[:2], length, num_keys)
        strides = (*block.stride()[:2], width - 1, 1)
        yield start, block.as_strided(size, strides, block.storage_offset() + length - 1)


def products_by_distance(states_BHQD: torch.Tensor, rows_HLD: torch.Tensor, num_keys: int) -> torch.Tensor:
    """(B, H, Q, K): at i, j the product of state i and row j - i + Q - 1."""
    found = [products for _, products in runs(states_BHQD, rows_HLD, num_keys)]
    return found[0] if len(found) == 1 else torch.cat(found, dim=2)


def products_of_keys_by_distance(key_BHKD: torch.Tensor, rows_HLD: torch.Tensor, num_queries: int) -> torch.Tensor:
    """(B, H, Q, K): at i, j the product of key j and row j - i + Q - 1."""
    if num_queries == 1:  # each key meets one row
        return (key_BHKD * rows_HLD).sum(-1).unsqueeze(2)
    return products_by_distance(key_BHKD, rows_HLD.flip(1), num_queries).transpose(-1, -2)


def add_products_by_distance(sum_BHQK: torch.Tensor, states_BHQD: torch.Tensor, rows_HLD: torch.Tensor) -> None:
    """Add the products in place, run by run, so that no more than a run of them is there beside the sum."""
    for start, products in runs(states_BHQD, rows_HLD, sum_BHQK.shape[3]):
        sum_BHQK[:, :, start : start + RUN].add_(products)


def add_products_of_keys_by_distance(sum_BHQK: torch.Tensor, key_BHKD: torch.Tensor, rows_HLD: torch.Tensor) -> None:
    """The same of keys: by key, the roles of the two are exchanged, and so is the order of distances."""
    if sum_BHQK.shape[2] == 1:
        sum_BHQK.add_(products_of_keys_by_distance(key_BHKD, rows_HLD, 1))
        return
    add_products_by_distance(sum_BHQK.transpose(-1, -2), key_BHKD, rows_HLD.flip(1))
