"""The forms a score term can take. Each says what the term depends on, so that `attention/` can apply it cheaply.

Shape legend: B batch, H heads, Q queries, K keys, D head size, L = Q + K - 1 distances, R rows of a table.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import torch


@dataclasses.dataclass(frozen=True)
class DistanceBias:
    """A bias that depends on the head and the distance only, as in ALiBi and T5."""

    values: torch.Tensor
    """The bias at each of `Positions.distances`: (H, L) if positions are uniform, else (H, B, Q, K)."""


@dataclasses.dataclass(frozen=True)
class DistanceTable:
    """One vector per distance, stored as rows of a table and the row of each distance."""

    rows_HRD: torch.Tensor
    """The vectors, (H or 1, R, D)."""
    index: torch.Tensor
    """The row of each of `Positions.distances`: (L,) if positions are uniform, else (B, Q, K)."""


@dataclasses.dataclass(frozen=True)
class QueryTerm:
    """The dot product of the query (before rotation) and a vector per distance, as in Shaw et al. 2018."""

    table: DistanceTable


@dataclasses.dataclass(frozen=True)
class KeyTerm:
    """The dot product of the key (as cached) and a vector per distance, as DeBERTa's position-to-content term."""

    table: DistanceTable


@dataclasses.dataclass(frozen=True)
class Separable:
    """The dot product of a function of the query and a function of the key, f(i) . g(j), as in TUPE."""

    queries: torch.Tensor
    """f(i), (B or 1, H or 1, Q, any width)."""
    keys: torch.Tensor
    """g(j), (B or 1, H or 1, K, the same width)."""


@dataclasses.dataclass(frozen=True)
class RunningSum:
    """A running sum along the row at the query minus that at the key, c_i - c_j, as in the Forgetting Transformer."""

    queries: torch.Tensor
    """c_i, (B, H, Q). Sums are in float64 where the device has it, because their differences matter."""
    keys: torch.Tensor
    """c_j, (B, H, K)."""

    def relative(self, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Both minus the sum at the last query, in a dtype that would not hold long sums exactly."""
        last = self.queries[..., -1:]
        return (self.queries - last).to(dtype), (self.keys - last).to(dtype)


Term = DistanceBias | QueryTerm | KeyTerm | Separable | RunningSum | torch.Tensor
"""Any score term. A plain tensor, (B or 1, H, Q or 1, K), is for terms that fit none of the cheaper forms."""


class Remap(NamedTuple):
    """Another rotation for far keys. Keys fall into parts by their position: near ones, then one or more far parts."""

    starts_BQ: tuple[torch.Tensor, ...]
    """For each query, the position of the first near key; then that of the first key of each far part but the last."""
    keys_BK: torch.Tensor
    """The positions of the keys."""
    rotate_queries: tuple[Callable[[torch.Tensor], torch.Tensor], ...]
    """For each far part, rotates queries, (B, H, Q, D), on from where they are."""
    rotate_keys: Callable[[torch.Tensor], torch.Tensor]
    """Rotates all keys, or the first ones, (B, G, K, D), on from where they are to where all far parts have them."""
