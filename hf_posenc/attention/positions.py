"""From the inputs of a forward to `Positions`: padding, packing, caches and explicit position_ids.

Without position_ids, a token's position is its slot less the padding in front of it. With them, they are honoured:
a position that falls, or is zero again, begins a new document; one that rises by more than one is a gap.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from ..schemes.inputs import Positions, is_tracing
from .cache import (
    cache_record,
    cached_length,
    check_cache_order,
    check_continues,
    concat_cached_positions,
    self_attention_cache,
    total_key_length,
)
from .masks import PositionOrder, classify_positions, document_mask, visible_keys


@dataclasses.dataclass
class ResolvedPositions:
    """The positions of a forward, and the attention mask that goes with them."""

    positions: Positions
    attention_mask: Any
    order: PositionOrder
    seen: int | torch.Tensor
    """How many slots of the cache were filled before this forward."""
    visible_BK: torch.Tensor | None
    """Which keys are tokens, not padding; None: all of them."""
    visible_BQK: torch.Tensor | None
    """Which keys each query sees, where a mask was given that says so."""
    all_BK: torch.Tensor | None = None
    """The positions of all tokens so far, where they are known."""
    inputs_embeds_BQE: torch.Tensor | None = None
    """The word embeddings, where a later call must know of them."""


@dataclasses.dataclass(frozen=True)
class PositionNeeds:
    """What the schemes of a model ask of positions, beyond those of the queries."""

    distances: bool
    key_positions: bool


def resolve_positions(
    inputs: dict[str, Any], dtype: torch.dtype, config: Any, causal: bool, needs: PositionNeeds
) -> ResolvedPositions:
    """Find where the tokens of one forward stand, and shut documents that share a row off from each other."""
    tokens = token_like(inputs)
    num_queries = tokens.shape[-1]
    rows = tokens.numel() // max(num_queries, 1)
    mask, given = inputs.get("attention_mask"), inputs.get("position_ids")
    padding = mask.reshape(rows, -1).bool() if isinstance(mask, torch.Tensor) and mask.dim() < 4 else None
    pairs = _seen_by_each(mask) if padding is None else None
    visible_BK = pairs.any(1) if pairs is not None else padding
    cache = self_attention_cache(inputs.get("past_key_values"))
    seen = cached_length(cache)
    first_call = isinstance(seen, int) and seen == 0
    slots_BQ = torch.arange(num_queries, device=tokens.device)[None] + seen

    ahead = 0 if padding is None or given is not None else _leading_padding(padding)
    if given is None:
        queries_BQ = slots_BQ if padding is None else (slots_BQ - ahead).clamp(min=0)
        order, by_slot = PositionOrder.CONTIGUOUS, True
    else:
        queries_BQ = given.reshape(-1, num_queries)
        real_BQ = _at_slots(visible_BK, seen, num_queries)
        order, by_slot = classify_positions(queries_BQ, slots_BQ, real_BQ)
        by_slot = by_slot and (first_call or _shows_all(visible_BK, seen, num_queries))
    check_cache_order(cache, seen, order, needs.distances)
    everything = concat_cached_positions(cache, queries_BQ.expand(rows, -1), seen) if needs.distances else None
    if given is not None and everything is not None and not first_call:
        check_continues(everything, visible_BK, seen)

    key_length, keys_BK = total_key_length(cache, seen, num_queries), None
    by_slot = by_slot or not needs.distances
    if given is None and needs.key_positions:
        keys_BK = (torch.arange(key_length, device=tokens.device)[None] - ahead).clamp(min=0)
    elif needs.key_positions or not by_slot:
        keys_BK = _key_positions(queries_BQ, visible_BK, seen, first_call, key_length)
    if by_slot:
        distances = torch.arange(num_queries + key_length - 1, device=tokens.device) - (num_queries - 1) - seen
    else:
        assert keys_BK is not None
        distances = keys_BK[:, None, :] - queries_BQ[:, :, None]
    if given is not None and first_call and (mask is None or padding is not None):
        mask = document_mask(order, queries_BQ.expand(rows, -1), mask, padding, config, causal, dtype)
        if isinstance(mask, torch.Tensor) and mask.dim() == 4:  # a static cache hands out slots that are still empty
            nothing = False if mask.dtype == torch.bool else torch.finfo(mask.dtype).min
            mask = torch.nn.functional.pad(mask, (0, key_length - num_queries), value=nothing)
    positions = Positions(
        queries_BQ=queries_BQ,
        distances=distances,
        uniform=by_slot,
        key_length=key_length,
        length_bound=seen + num_queries if given is None and isinstance(seen, int) else None,
        cached=not first_call,
        cache_filled_at=cache_record(cache).prefill_length,
        packed=order in (PositionOrder.PACKED, PositionOrder.UNKNOWN),
        dtype=torch.float64 if dtype == torch.float64 else torch.float32,
        keys_BK=keys_BK,
    )
    positions.causal = causal
    if padding is not None and order is PositionOrder.CONTIGUOUS and first_call and needs.distances:
        positions.spans = _spans(padding[:, :num_queries])
    return ResolvedPositions(positions, mask, order, seen, visible_BK, pairs, everything)


def token_like(inputs: dict[str, Any]) -> torch.Tensor:
    """Something with the shape of the token ids, also where embeddings were passed instead."""
    return inputs["input_ids"] if inputs.get("input_ids") is not None else inputs["inputs_embeds"][..., 0]


def _spans(padding: torch.Tensor) -> tuple[tuple[int, int], ...] | None:
    """Where the tokens of each row begin and end; None if there are holes between them. Read on a CPU only."""
    if is_tracing() or padding.device.type != "cpu":
        return None
    counts = padding.sum(-1).tolist()
    starts = [start if count else 0 for start, count in zip(padding.int().argmax(-1).tolist(), counts, strict=True)]
    spans = tuple((start, start + count) for start, count in zip(starts, counts, strict=True))
    return spans if all(row[start:stop].all() for row, (start, stop) in zip(padding, spans, strict=True)) else None


def _shows_all(visible_BK: torch.Tensor | None, seen: int | torch.Tensor, num_queries: int) -> bool:
    """Whether no key is hidden: those of a cache are then where their slots are, counted back from the queries."""
    if visible_BK is None:
        return True
    return isinstance(seen, int) and not is_tracing() and bool(visible_BK[:, : seen + num_queries].all())


def _leading_padding(padding: torch.Tensor) -> torch.Tensor:
    return (padding.cumsum(-1) == 0).sum(-1, keepdim=True)


def _seen_by_each(mask: Any) -> torch.Tensor | None:
    """(B, Q, K): the keys that a 4D mask shows to each query. generate() prepares such masks for static caches."""
    if not isinstance(mask, torch.Tensor):
        return None
    return visible_keys(mask).any(1)


def _at_slots(visible_BK: torch.Tensor | None, seen: int | torch.Tensor, num_queries: int) -> torch.Tensor | None:
    """(B, Q): which of the new tokens are visible, that is not padding."""
    if visible_BK is None:
        return None
    if isinstance(seen, int) and visible_BK.shape[-1] < seen + num_queries:
        raise ValueError(
            f"attention_mask covers {visible_BK.shape[-1]} tokens, but {seen} cached and {num_queries} new ones are to "
            "be attended to: pass the mask of all of them"
        )
    if isinstance(seen, int):
        return visible_BK[:, seen : seen + num_queries]
    slots = torch.arange(num_queries, device=visible_BK.device) + seen
    return visible_BK.index_select(1, slots)


def _key_positions(
    queries: torch.Tensor, visible_BK: torch.Tensor | None, seen: Any, first_call: bool, key_length: int
) -> torch.Tensor:
    """(B, K). On a first call keys are the queries; later, a key's place is its count among the visible ones."""
    pad = torch.nn.functional.pad
    if first_call:
        return pad(queries, (0, key_length - queries.shape[-1]))
    if visible_BK is None:
        visible_BK = torch.ones(1, key_length, dtype=torch.bool, device=queries.device)
    visible_BK = pad(visible_BK[:, :key_length], (0, max(key_length - visible_BK.shape[-1], 0)))
    counts = visible_BK.cumsum(-1)
    real = _at_slots(visible_BK, seen, queries.shape[-1])
    assert real is not None
    places = _at_slots(counts, seen, queries.shape[-1])
    assert places is not None
    real, shifts = torch.broadcast_tensors(real, queries - places)
    return counts + shifts.gather(1, real.int().argmax(-1, keepdim=True))
