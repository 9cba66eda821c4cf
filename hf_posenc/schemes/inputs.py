"""What a scheme reads: the positions of one forward pass, and the queries and keys of one layer.

Shape legend: B batch, H heads, G key heads, Q queries, K keys, D head size, E hidden size, L = Q + K - 1 distances,
R rows of a table.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers.integrations.sdpa_attention import repeat_kv

from ..errors import PosEncError, SequenceLengthError
from .terms import RunningSum

if TYPE_CHECKING:
    from .base import Scheme

LayerSeams = dict[str, tuple[int, ...]]
"""For each seam of one layer, the indices of the schemes that act there."""


def is_tracing() -> bool:
    """Whether this forward pass is being compiled or exported, so no tensor value may be read."""
    return torch.compiler.is_compiling() or torch.jit.is_tracing()


def repeat_key_heads(states_BGKD: torch.Tensor, num_heads: int) -> torch.Tensor:
    """(B, H, K, D): keys or values repeated for every query head that shares them; the same tensor if none do."""
    repeated: torch.Tensor = repeat_kv(states_BGKD, num_heads // states_BGKD.shape[1])
    return repeated


@dataclasses.dataclass(eq=False)
class Positions:
    """The positions of one forward pass, and what each scheme prepared for them. Built once and passed to every layer.

    `distances` is key position minus query position. If every query sees its keys at the same distances slot by slot
    (`uniform`), it is one vector of length L: key slot j is at `distances[j - i + Q - 1]` from query slot i. That holds
    in packed rows too, because a query sees the keys of its own document only. Otherwise (gaps in position_ids, or
    packed rows under a mask of the caller's own) it has shape (B, Q, K).
    """

    queries_BQ: torch.Tensor
    distances: torch.Tensor
    _: dataclasses.KW_ONLY
    uniform: bool
    key_length: int
    length_bound: int | None
    """No position reaches this; None if explicit position_ids leave it unknown."""
    cached: bool
    """Whether keys of earlier calls take part."""
    num_cached: int | torch.Tensor
    """How many tokens earlier calls left in the cache."""
    cache_filled_at: int | None
    """The length of the first of those calls, if a scheme depends on it."""
    packed: bool
    """Whether rows contain, or may contain, several documents."""
    causal: bool
    """Whether queries see no later key unless a mask says otherwise."""
    backend: str
    dtype: torch.dtype
    """The dtype for biases: float32, or float64 in a float64 model. Never narrower."""
    keys_BK: torch.Tensor | None = None
    """The positions of all keys, if a scheme sets `needs_key_positions`."""
    key_counts_BHQ: torch.Tensor | None = None
    """How many keys each query sees, itself included, (B or 1, H or 1, Q), if a scheme sets `needs_key_counts`."""
    window_key_counts_BHQ: torch.Tensor | None = None
    """The same in layers with a sliding window, if the model has some."""
    tokens_BHQ: torch.Tensor | None = None
    """Which of the new tokens are not padding, (B, H or 1, Q), if a scheme acts at `gate`; None: all."""
    spans: tuple[tuple[int, int], ...] | None = None
    """Start and end of each row's tokens, if the mask is padding at the ends of rows only."""
    table: nn.Module | None = None
    """The architecture's own position table, if a scheme adds it instead of the architecture."""
    rotary: nn.Module | None = None
    """The architecture's own rotary embedding, if it has one."""
    rotary_positions: torch.Tensor | None = None
    """The positions that the rotary embedding reads, with an axis for each of its axes; None: those of the queries."""
    context_BQE: torch.Tensor | None = None
    """The mean embedding of the tokens that a query may see, if a scheme sets `needs_context`."""
    schemes: Sequence[Scheme] = ()
    active: tuple[LayerSeams, ...] = ()

    def __post_init__(self) -> None:
        self._stock_angles: dict[object, tuple[torch.Tensor, torch.Tensor]] = {}
        self._windows: dict[int, Positions] = {}
        self._in_window: Positions | None = None
        self.block_masks: dict[Any, Any] = {}
        """flex_attention's block masks of this forward pass, which the layers share."""
        self.prepared: list[Any] = []  # set first: hooks on a scheme may copy these positions to its device
        self.prepared = [scheme("prepare", self) for scheme in self.schemes]

    def length(self) -> int | None:
        """One more than the highest position; while tracing, the bound."""
        return self.length_bound if is_tracing() else int(self.queries_BQ.max()) + 1

    def of_window(self, num_keys: int) -> Positions:
        """The same for the keys that a cache of sliding windows returns: the last ones, or those so far."""
        if num_keys not in self._windows:
            window, num_queries = copy.copy(self), self.queries_BQ.shape[-1]
            window.key_length, window.spans, num_dropped = num_keys, None, self.key_length - num_keys
            if self.uniform:
                before, room = self.num_cached, num_keys - num_queries
                before = min(before, room) if isinstance(before, int) else before.clamp(max=room)
                slots = torch.arange(num_queries + num_keys - 1, device=self.distances.device)
                window.distances = slots - (num_queries - 1) - before
            else:
                window.distances = self.distances[..., num_dropped:]
            window.keys_BK = None if self.keys_BK is None else self.keys_BK[:, num_dropped:]
            window._stock_angles = {}
            window.prepared = [scheme("prepare", window) for scheme in self.schemes]
            self._windows[num_keys] = window
        return self._windows[num_keys]

    def in_window(self) -> Positions:
        """The same for layers with a sliding window, whose queries see fewer keys."""
        if self.window_key_counts_BHQ is None:
            return self
        if self._in_window is None:
            window = copy.copy(self)
            window.key_counts_BHQ, window.window_key_counts_BHQ = self.window_key_counts_BHQ, None
            window._windows = {}
            window.prepared = [
                scheme("prepare", window) if scheme.needs_key_counts else prepared
                for scheme, prepared in zip(self.schemes, self.prepared, strict=True)
            ]
            self._in_window = window
        return self._in_window

    def stock_angles(self, layer_type: str | None, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The cos and sin of the architecture's own rotation, in the dtype and on the device of some states."""
        assert self.rotary is not None
        key = (layer_type, states.dtype, states.device)
        if key not in self._stock_angles:
            by_layer_type = {"layer_type": layer_type} if hasattr(self.rotary, "layer_types") else {}
            position_ids = self.queries_BQ if self.rotary_positions is None else self.rotary_positions
            self._stock_angles[key] = self.rotary(states, position_ids.to(states.device), **by_layer_type)
        return self._stock_angles[key]

    def stock_offset_angles(
        self, layer_type: str | None, states: torch.Tensor, name: object, offsets_BN: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The cos and sin of the architecture's own rotation by some offsets, without its scaling of the attention."""
        assert self.rotary is not None
        key = (layer_type, states.dtype, states.device, name)
        if key not in self._stock_angles:
            by_layer_type = {"layer_type": layer_type} if hasattr(self.rotary, "layer_types") else {}
            offsets_BN = offsets_BN.to(states.device)
            cos, sin = self.rotary(states, offsets_BN, **by_layer_type)
            factor = self.rotary(states, torch.zeros_like(offsets_BN[:1, :1]), **by_layer_type)[0].flatten()[0]
            self._stock_angles[key] = cos / factor, sin / factor
        return self._stock_angles[key]

    def distances_BQK(self) -> torch.Tensor:
        """All distances; (1, Q, K) if they are uniform."""
        if not self.uniform:
            return self.distances
        num_queries, device = self.queries_BQ.shape[-1], self.distances.device
        keys, queries = torch.arange(self.key_length, device=device), torch.arange(num_queries, device=device)
        return self.distances[keys - queries[:, None] + num_queries - 1][None]

    def to(self, device: torch.device | str | int, non_blocking: bool = False) -> Positions:
        """A copy on another device. Hooks of models that span several devices call this."""

        def move(value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                return value.to(device, non_blocking=non_blocking)
            if isinstance(value, tuple) and hasattr(value, "_fields"):
                return type(value)(*map(move, value))
            return type(value)(map(move, value)) if isinstance(value, (tuple, list)) else value

        moved = copy.copy(self)
        moved.queries_BQ, moved.distances = move(self.queries_BQ), move(self.distances)
        moved.prepared, moved.keys_BK = move(self.prepared), move(self.keys_BK)
        moved.key_counts_BHQ = move(self.key_counts_BHQ)
        moved.window_key_counts_BHQ = move(self.window_key_counts_BHQ)
        moved.tokens_BHQ = move(self.tokens_BHQ)
        moved._windows, moved._in_window, moved.block_masks = {}, None, {}
        return moved


@dataclasses.dataclass(eq=False)
class Content:
    """The queries and keys of one layer's attention, for score terms that depend on them."""

    query_BHQD: torch.Tensor
    """Before any rotation, so that a term of query and distance stays one when combined with a rotation."""
    rotated_query_BHQD: torch.Tensor
    """As it is multiplied with the keys."""
    key_BGKD: torch.Tensor
    """As cached, after any rotation; one per group of heads that share a key."""
    scaling: float
    """The architecture's scaling of query times key."""
    visible: Callable[[], torch.Tensor]
    """Returns the mask of keys that each query may see: (B or 1, 1, Q, K), True where visible."""
    project: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
    """Projects hidden states (R, E) with the layer's own query and key projections, to two of (H, R, D)."""
    local_heads: slice | None = None
    """Which heads these are, if tensor parallelism divides them among processes; None: all."""
    running_sum: RunningSum | None = None
    """The running sums of what the scheme's `gate` returned for all tokens so far, if it has one."""
    _key_BHKD: torch.Tensor | None = None

    def of_heads(self, heads: slice) -> Content:
        """The same for a range of heads, which must be whole key groups."""
        group_size = self.query_BHQD.shape[1] // self.key_BGKD.shape[1]
        groups = slice(heads.start // group_size, heads.stop // group_size)
        query_BHQD, rotated_BHQD = self.query_BHQD[:, heads], self.rotated_query_BHQD[:, heads]
        return Content(query_BHQD, rotated_BHQD, self.key_BGKD[:, groups], self.scaling, self.visible, self.project)

    def select_heads(self, tensor: torch.Tensor, axis: int = 0) -> torch.Tensor:
        """The heads that this content has, of a tensor with one entry for every head of the model.

        Args:
            tensor: Parameters of all heads, or what was computed from them.
            axis: The axis of the heads.

        Returns:
            A view of some heads under tensor parallelism, else the tensor itself.
        """
        if self.local_heads is None:
            return tensor
        return tensor.narrow(axis, self.local_heads.start, self.local_heads.stop - self.local_heads.start)

    @property
    def key_BHKD(self) -> torch.Tensor:
        """The keys, repeated for every head of their group."""
        if self._key_BHKD is None:
            self._key_BHKD = repeat_key_heads(self.key_BGKD, self.query_BHQD.shape[1])
        return self._key_BHKD


# FSDP's mixed precision copies dataclasses and casts the tensors in them; to it, these must be plain objects.
del Positions.__dataclass_fields__, Content.__dataclass_fields__


def check_table_length(
    name: str, positions: Positions, max_positions: int, way_out: str = "", first_position: int = 0
) -> None:
    """Raise SequenceLengthError if a position is past the table, and PosEncError if one is before it.

    `way_out` may contain `{length}`.
    """
    if positions.length_bound is not None and positions.length_bound <= max_positions:
        return  # the common case, decided without reading a tensor
    length = positions.length()
    if not is_tracing() and int(positions.queries_BQ.min()) < first_position:
        raise PosEncError(f"position_ids must not be negative: the {name} table starts at position {first_position}")
    if length is not None and length > max_positions:
        ways_out = "truncate the input, or use a scheme that extends (rope, alibi, t5, sinusoidal, none)"
        if way_out:
            ways_out = f"{ways_out}, or {way_out.format(length=length)}"
        raise SequenceLengthError(
            f"The input reaches position {length - 1} (length {length}), but the {name} table serves "
            f"{max_positions} positions: {ways_out}"
        )
