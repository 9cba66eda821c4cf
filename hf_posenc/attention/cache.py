"""KV caches: how far they are filled, what hf_posenc records on them, and when they cannot be continued.

Shape legend: B batch, Q new tokens, K all tokens so far.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import torch
from transformers import Cache
from transformers.utils import ModelOutput

from ..errors import PosEncError
from ..schemes import Positions, is_tracing
from .masks import PositionOrder


@dataclasses.dataclass
class CacheRecord:
    """What later calls must know about the cached tokens, stored on the cache as `posenc_record`."""

    order: PositionOrder = PositionOrder.CONTIGUOUS
    prefill_length: int | None = None
    """Length of the first call; set only if a scheme depends on it."""
    positions_BK: torch.Tensor | None = None


def cache_record(cache: Cache | None) -> CacheRecord:
    """The record on a cache, or a blank one."""
    return getattr(cache, "posenc_record", None) or CacheRecord()


def annotate_cache(
    cache: Cache,
    positions: Positions,
    order: PositionOrder,
    positions_BK: torch.Tensor | None,
    depends_on_length: bool,
) -> None:
    """Record on the cache what a later call cannot infer from its own inputs."""
    if is_tracing():
        return
    record = cache.posenc_record = cache_record(cache)
    record.order = order
    if depends_on_length and not positions.cached:
        record.prefill_length = positions.length()
    if positions_BK is not None:
        record.positions_BK = positions_BK


def self_attention_cache(cache: Cache | None) -> Cache | None:
    """The self-attention cache of an encoder-decoder cache; any other cache as it is."""
    return getattr(cache, "self_attention_cache", cache)


def updated_caches(past_key_values: Cache | None, outputs: ModelOutput | tuple[object, ...]) -> list[Cache]:
    """The self-attention cache that a forward has filled, if any: the one passed in, else the one returned.

    With use_cache=False, some models fill the cache they were passed but do not return it.
    """
    candidates: Iterable[object] = outputs if isinstance(outputs, tuple) else [outputs.get("past_key_values")]
    if past_key_values is not None:
        candidates = [past_key_values]
    return [self_attention_cache(cache) for cache in candidates if hasattr(cache, "get_seq_length")]


def cached_length(cache: Cache | None) -> int | torch.Tensor:
    """The number of filled slots: a tensor while tracing a static cache, else an int."""
    length: int | torch.Tensor = cache.get_seq_length() if cache is not None else 0
    if isinstance(length, torch.Tensor):
        return length.clone() if is_tracing() else int(length)
    return length


def static_cache_length(cache: Cache) -> int | None:
    """The number of slots of a static cache; None for a cache that grows."""
    max_length = getattr(cache, "get_max_length", None) or cache.get_max_cache_shape
    length: int | None = max_length(0)  # of the first layer: a cache without layers has no limit yet
    return length if length is not None and length > 0 else None


def total_key_length(cache: Cache | None, past_length: int | torch.Tensor, num_queries: int) -> int:
    """The number of keys that attention gets: a static cache returns all its slots, filled or not."""
    slots = static_cache_length(cache) if cache is not None else None
    if slots is not None:
        return slots
    assert isinstance(past_length, int)
    return past_length + num_queries


def check_cache_order(
    cache: Cache | None, past_length: int | torch.Tensor, order: PositionOrder, needs_distances: bool
) -> None:
    """Refuse to continue a cache where positions with gaps or restarts leave the cached positions undefined."""
    if cache is None or (isinstance(past_length, int) and past_length == 0):
        return
    orders = (order, cache_record(cache).order)
    if PositionOrder.PACKED in orders:
        raise PosEncError(
            "packed rows (position_ids that restart) cannot be continued from a cache: pass whole rows with "
            "use_cache=False, or one document per row"
        )
    if needs_distances and PositionOrder.GAPS in orders:
        raise PosEncError(
            "this position scheme needs the distance to every cached key, which position_ids with gaps leave "
            "undefined: pass whole rows with use_cache=False, or position_ids without gaps"
        )


def concat_cached_positions(
    cache: Cache | None, positions_BQ: torch.Tensor, past_length: int | torch.Tensor
) -> torch.Tensor | None:
    """(B, K): the positions of all tokens so far; None if those of the cached ones were not recorded."""
    if not isinstance(past_length, int):
        return None
    if past_length == 0:
        return positions_BQ
    cached_BK = cache_record(cache).positions_BK
    if cached_BK is None or cached_BK.shape[0] != positions_BQ.shape[0] or cached_BK.shape[1] < past_length:
        return None
    return torch.cat([cached_BK[:, :past_length].to(positions_BQ.device), positions_BQ], dim=-1)


def check_continues(
    positions_BK: torch.Tensor, visible_BK: torch.Tensor | None, past_length: int | torch.Tensor
) -> None:
    """Refuse new positions that do not continue the cached ones.

    Cached keys are located by counting back from the queries, which is right only for contiguous positions.
    """
    assert isinstance(past_length, int)
    if is_tracing() or _continues_without_padding(positions_BK, visible_BK, past_length):
        return
    visible = torch.ones_like(positions_BK, dtype=torch.bool)
    if visible_BK is not None:
        visible = visible_BK[:, : positions_BK.shape[1]].expand_as(positions_BK)
    if not bool(_rows_continue(positions_BK, visible, past_length).all()):
        raise PosEncError(
            "position_ids do not continue where the cached tokens end, but this position scheme needs the distance "
            "to each of them: pass whole rows with use_cache=False, or position_ids that continue by one"
        )


def _continues_without_padding(positions_BK: torch.Tensor, visible_BK: torch.Tensor | None, past_length: int) -> bool:
    """The common case, checked cheaply because it runs for every new token."""
    boundary = slice(past_length - 1, past_length + 1)
    by_one = (positions_BK[:, boundary].diff() == 1).all()
    return bool(by_one if visible_BK is None else by_one & visible_BK[:, boundary].all())


def _rows_continue(positions_BK: torch.Tensor, visible_BK: torch.Tensor, past_length: int) -> torch.Tensor:
    """(B,): whether a row's first new position is one above the last cached one, of this row or of any other.

    Any other, because the record does not follow when the rows of a cache are reordered.
    """
    slots = torch.arange(positions_BK.shape[1], device=positions_BK.device)
    last_cached = torch.where(visible_BK & (slots < past_length), slots, -1).amax(-1)
    first_new = torch.where(visible_BK & (slots >= past_length), slots, len(slots)).amin(-1)
    all_padding = (last_cached < 0) | (first_new >= len(slots))
    new_B1 = positions_BK.gather(1, first_new.clamp(max=len(slots) - 1)[:, None])
    cached_BB = positions_BK.t()[last_cached.clamp(min=0)]  # at each row's last cached slot, the position in every row
    return ((new_B1 - cached_BB) == 1).any(-1) | all_padding
