"""What a scheme reads: the positions of one forward pass, and the queries and keys of one layer.

Shape legend: B batch, H heads, G key heads, Q queries, K keys, D head size, E hidden size, L = Q + K - 1 distances,
R rows of a table.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers.integrations.sdpa_attention import repeat_kv

if TYPE_CHECKING:
    from .base import Scheme


def is_tracing() -> bool:
    """Whether this forward is being recorded, so that no tensor can be read and nothing decided by its values."""
    return torch.compiler.is_compiling() or torch.jit.is_tracing()


def repeat_key_heads(states_BGKD: torch.Tensor, num_heads: int) -> torch.Tensor:
    """(B, H, K, D): keys or values repeated for every query head that shares them; the same tensor if none do."""
    return repeat_kv(states_BGKD, num_heads // states_BGKD.shape[1])


class Positions:
    """Where the tokens of one forward stand. Built once a forward, handed to every layer.

    `distances` is key position minus query position. When every query sees its keys at the same distances by slot
    (`uniform`), it is one vector, L long: key slot j from query slot i is at `distances[j - i + Q - 1]`. Otherwise
    (gaps, packed rows) it is of shape (B, Q, K).

    A plain class, not a dataclass: FSDP's mixed precision looks into dataclasses and would narrow what is in here.
    """

    schemes: Sequence[Scheme] = ()
    active: tuple[dict[str, tuple[int, ...]], ...] = ()
    """For each layer and seam, the places of the schemes that act there."""

    def __init__(
        self,
        queries_BQ: torch.Tensor,
        distances: torch.Tensor,
        *,
        uniform: bool,
        key_length: int,
        length_bound: int | None,
        cached: bool,
        cache_filled_at: int | None,
        packed: bool,
        dtype: torch.dtype,
        keys_BK: torch.Tensor | None = None,
    ) -> None:
        self.queries_BQ = queries_BQ
        self.distances = distances
        self.uniform = uniform
        self.key_length = key_length
        self.length_bound = length_bound
        """No position is above this less one; None where explicit position_ids leave it open."""
        self.cached = cached
        """Whether keys of earlier calls take part."""
        self.cache_filled_at = cache_filled_at
        """The length at which the first of those calls was made, where a scheme asks for it."""
        self.packed = packed
        """Whether rows hold, or may hold, several documents."""
        self.dtype = dtype
        """What biases are computed in: float32, or float64 in a float64 model. Never narrower."""
        self.keys_BK = keys_BK
        """The positions of all keys, where a scheme asks for them (`needs_key_positions`)."""
        self.table: nn.Module | None = None
        """The architecture's own position table, where it is left to a scheme to read it and put it in."""
        self.spans: tuple[tuple[int, int], ...] | None = None
        """For each row the slots from its first token to behind its last, where the mask is padding at the ends only
        and that could be read; None otherwise."""
        self.causal = False
        """Whether queries see no key ahead, where no mask says otherwise."""
        self.context_BQE: torch.Tensor | None = None
        """The mean of the words that a query may know of, where a scheme asks for it (`needs_context`)."""
        self.prepared: list[Any] = []
        """What each scheme's `prepare` returned, by its place in `position_scheme`."""

    def length(self) -> int | None:
        """One more than the highest position. While traced, when no tensor can be read: the bound."""
        if is_tracing():
            return self.length_bound
        return int(self.queries_BQ.max()) + 1

    def distances_BQK(self) -> torch.Tensor:
        """All distances, written out where they are uniform: (1, Q, K) then."""
        if not self.uniform:
            return self.distances
        num_queries = self.queries_BQ.shape[-1]
        device = self.distances.device
        keys, queries = torch.arange(self.key_length, device=device), torch.arange(num_queries, device=device)
        return self.distances[keys - queries[:, None] + num_queries - 1][None]

    def to(self, device: Any, non_blocking: bool = False) -> Positions:
        """The same on another device: what hooks of models that span several devices call."""

        def move(value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                return value.to(device, non_blocking=non_blocking)
            if isinstance(value, tuple) and hasattr(value, "_fields"):
                return type(value)(*map(move, value))
            return type(value)(map(move, value)) if isinstance(value, (tuple, list)) else value

        moved = copy.copy(self)
        moved.queries_BQ, moved.distances = move(self.queries_BQ), move(self.distances)
        moved.prepared, moved.keys_BK = move(self.prepared), move(self.keys_BK)
        return moved


class Content:
    """What one layer's attention is about to multiply, for score terms that depend on it."""

    def __init__(
        self,
        query_BHQD: torch.Tensor,
        rotated_query_BHQD: torch.Tensor,
        key_BGKD: torch.Tensor,
        scaling: float,
        visible: Callable[[], torch.Tensor],
        project: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]],
    ) -> None:
        self.query_BHQD = query_BHQD
        """Before any rotation, so that a term of the query and the distance stays one beside a rotation."""
        self.rotated_query_BHQD = rotated_query_BHQD
        """As it meets the keys."""
        self.scaling = scaling
        """What the architecture multiplies the product of query and key by."""
        self.visible = visible
        """Gives the keys that each query may see, True at them: (B or 1, 1, Q, K)."""
        self.project = project
        """Sends states, (R, E), through the layer's own query and key projections: two of (H, R, D)."""
        self.key_BGKD = key_BGKD
        """As the cache has them, after any rotation: one for each group of heads that share a key."""
        self._key_BHKD: torch.Tensor | None = None

    def of_heads(self, heads: slice) -> Content:
        """The same for some of the heads: whole groups that share a key, one or several."""
        shared = self.query_BHQD.shape[1] // self.key_BGKD.shape[1]
        groups = slice(heads.start // shared, heads.stop // shared)
        return Content(
            self.query_BHQD[:, heads],
            self.rotated_query_BHQD[:, heads],
            self.key_BGKD[:, groups],
            self.scaling,
            self.visible,
            self.project,
        )

    @property
    def key_BHKD(self) -> torch.Tensor:
        """The keys once for each head."""
        if self._key_BHKD is None:
            self._key_BHKD = repeat_key_heads(self.key_BGKD, self.query_BHQD.shape[1])
        return self._key_BHKD


def check_table_length(name: str, positions: Positions, max_positions: int, way_out: str = "") -> None:
    """Raise ValueError if a position has no row; `way_out` is one beside the usual, `{length}` in it is filled in."""
    if positions.length_bound is not None and positions.length_bound <= max_positions:
        return  # the common case, known without reading a tensor
    length = positions.length()
    if not is_tracing() and int(positions.queries_BQ.min()) < 0:
        raise ValueError(f"position_ids must not be negative: the {name} table begins at position 0")
    if length is not None and length > max_positions:
        ways = "cut the input, or convert to a scheme that extends (rope, alibi, t5, sinusoidal, none)"
        if way_out:
            ways = f"{ways}, or {way_out.format(length=length)}"
        raise ValueError(
            f"the input reaches position {length - 1} (length {length}), but the {name} "
            f"table serves {max_positions} positions: {ways}"
        )
