"""Caches of earlier calls: how far they are filled, what is noted on them, and which of them cannot be gone on from."""

from __future__ import annotations

from typing import Any

import torch

from ..schemes.inputs import Positions, is_tracing
from .documents import PositionOrder


def self_attention_cache(cache: Any) -> Any:
    """Of the cache of a decoder with cross-attention, the part that self-attention uses."""
    return getattr(cache, "self_attention_cache", cache)


def cached_length(cache: Any) -> int | torch.Tensor:
    """How many slots the cache has filled. A static cache counts in a tensor, which tracing cannot read."""
    seen = cache.get_seq_length() if cache is not None else 0
    if isinstance(seen, torch.Tensor):
        return seen.clone() if is_tracing() else int(seen)
    return seen


def static_cache_length(cache: Any) -> int | None:
    """How many slots a static cache has; None for a cache that grows."""
    limit = getattr(cache, "get_max_length", None) or cache.get_max_cache_shape
    longest = limit(0)  # of the first layer: a cache that has none yet has no limit
    return longest if longest is not None and longest > 0 else None


def total_key_length(cache: Any, seen: int | torch.Tensor, num_queries: int) -> int:
    """How many keys attention will see: a static cache hands out all its slots, filled or not."""
    slots = static_cache_length(cache) if cache is not None else None
    if slots is not None:
        return slots
    assert isinstance(seen, int)
    return seen + num_queries


def annotate_cache(
    cache: Any, positions: Positions, order: PositionOrder, all_BK: torch.Tensor | None, length_matters: bool
) -> None:
    """Leave on the cache what a later call could not work out from its padding alone."""
    if is_tracing():
        return
    if order in (PositionOrder.GAPS, PositionOrder.RESTARTS) or hasattr(cache, "posenc_order"):
        cache.posenc_order = order
    if length_matters and not positions.cached:
        cache.posenc_filled_at = positions.length()
    if all_BK is not None:
        cache.posenc_positions = all_BK


def updated_caches(given: Any, outputs: Any) -> list[Any]:
    """The cache of self-attention that a forward filled, if any: the one it was given, else the one it gives out.

    Not all models give out a cache that they were given: with use_cache=False they fill it and keep silent.
    """
    if given is not None:
        return [self_attention_cache(given)]
    cache = outputs.get("past_key_values") if isinstance(outputs, dict) else None
    found = [cache] if cache is not None else outputs if isinstance(outputs, tuple) else []
    return [self_attention_cache(output) for output in found if hasattr(output, "get_seq_length")]


def check_cache_order(cache: Any, seen: Any, order: PositionOrder, needs_distances: bool) -> None:
    if cache is None or (isinstance(seen, int) and seen == 0):
        return
    earlier = getattr(cache, "posenc_order", PositionOrder.STEADY)
    if PositionOrder.RESTARTS in (order, earlier):
        raise ValueError(
            "rows that hold several documents (position_ids that restart) cannot be continued from a cache: pass "
            "use_cache=False and the whole rows, or one document a row"
        )
    if needs_distances and PositionOrder.GAPS in (order, earlier):
        raise ValueError(
            "this position scheme needs the distance to every cached key, and position_ids with gaps do not say "
            "where cached keys stand: pass use_cache=False and the whole rows, or position_ids without gaps"
        )


def concat_cached_positions(cache: Any, queries: torch.Tensor, seen: int | torch.Tensor) -> torch.Tensor | None:
    if not isinstance(seen, int):
        return None
    if seen == 0:
        return queries
    earlier = getattr(cache, "posenc_positions", None)
    if earlier is None or earlier.shape[0] != queries.shape[0] or earlier.shape[1] < seen:
        return None
    return torch.cat([earlier[:, :seen].to(queries.device), queries], dim=-1)


def check_continues(everything: torch.Tensor, visible_BK: torch.Tensor | None, seen: Any) -> None:
    """Later, keys are placed by counting back from the queries: that is right only if these go on where keys ended."""
    if is_tracing() or _plainly_goes_on(everything, visible_BK, seen):
        return
    visible = torch.ones_like(everything, dtype=torch.bool)
    if visible_BK is not None:
        visible = visible_BK[:, : everything.shape[1]].expand_as(everything)
    if not bool(_goes_on(everything, visible, seen).all()):
        raise ValueError(
            "position_ids do not go on where the cached tokens ended, and this position scheme needs the distance to "
            "each of them: pass use_cache=False and the whole rows, or position_ids that go on by one"
        )


def _plainly_goes_on(everything: torch.Tensor, visible_BK: torch.Tensor | None, seen: int) -> bool:
    """The common case in few operations, since it is asked for each new token: no padding where old and new meet."""
    meet = slice(seen - 1, seen + 1)
    by_one = (everything[:, meet].diff() == 1).all()
    return bool(by_one if visible_BK is None else by_one & visible_BK[:, meet].all())


def _goes_on(everything: torch.Tensor, visible: torch.Tensor, seen: int) -> torch.Tensor:
    """(B,): whether a row's first new position is one above the last cached one, of itself or of another row.

    Of another row, because what was noted about a cache does not follow when its rows are reordered.
    """
    places = torch.arange(everything.shape[1], device=everything.device)
    last = torch.where(visible & (places < seen), places, -1).amax(-1)
    first = torch.where(visible & (places >= seen), places, len(places)).amin(-1)
    incomparable = (last < 0) | (first >= len(places))
    new = everything.gather(1, first.clamp(max=len(places) - 1)[:, None])
    cached_by_row = everything.t()[last.clamp(min=0)]  # for each row's last slot, the position that every row has there
    return ((new - cached_by_row) == 1).any(-1) | incomparable
