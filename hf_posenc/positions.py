"""From the inputs of a forward to `Positions`: padding, packing, caches and explicit position_ids.

Without position_ids, a token's position is its slot less the padding in front of it. With them, they are honoured:
a position that falls, or is zero again, begins a new document; one that rises by more than one is a gap.
"""

from __future__ import annotations

import dataclasses
import enum
from typing import Any

import torch
from transformers.utils.generic import is_flash_attention_requested

from .scheme import Positions, tracing


class Order(enum.Enum):
    """How the positions of the real tokens run along the rows."""

    STEADY = "each is one above the one before"
    GAPS = "they rise, by more than one somewhere"
    RESTARTS = "they begin anew: rows hold several documents"
    UNKNOWN = "not known while the forward is traced"


@dataclasses.dataclass
class Located:
    """The positions of a forward, and the attention mask that goes with them."""

    positions: Positions
    attention_mask: Any
    order: Order
    seen: int | torch.Tensor
    """How many slots of the cache were filled before this forward."""
    visible_BK: torch.Tensor | None
    """Which keys are tokens, not padding; None: all of them."""
    visible_BQK: torch.Tensor | None
    """Which keys each query sees, where a mask was given that says so."""
    all_BK: torch.Tensor | None = None
    """The positions of all tokens so far, where they are known."""
    words_BQE: torch.Tensor | None = None
    """The word embeddings, where a later call must know of them."""


@dataclasses.dataclass(frozen=True)
class Needs:
    """What the schemes of a model ask of positions, beyond those of the queries."""

    distances: bool
    key_positions: bool


def locate(inputs: dict[str, Any], dtype: torch.dtype, config: Any, causal: bool, needs: Needs) -> Located:
    """Find where the tokens of one forward stand, and shut documents that share a row off from each other."""
    tokens = tokens_of(inputs)
    num_queries = tokens.shape[-1]
    rows = tokens.numel() // max(num_queries, 1)
    mask, given = inputs.get("attention_mask"), inputs.get("position_ids")
    padding = mask.reshape(rows, -1).bool() if isinstance(mask, torch.Tensor) and mask.dim() < 4 else None
    pairs = _seen_by_each(mask) if padding is None else None
    visible_BK = pairs.any(1) if pairs is not None else padding
    cache = self_attention_cache(inputs.get("past_key_values"))
    seen = _seen(cache)
    first_call = isinstance(seen, int) and seen == 0
    slots_BQ = torch.arange(num_queries, device=tokens.device)[None] + seen

    ahead = 0 if padding is None or given is not None else _leading_padding(padding)
    if given is None:
        queries_BQ = slots_BQ if padding is None else (slots_BQ - ahead).clamp(min=0)
        order, by_slot = Order.STEADY, True
    else:
        queries_BQ = given.reshape(-1, num_queries)
        real_BQ = _at_slots(visible_BK, seen, num_queries)
        order, by_slot = _survey(queries_BQ, slots_BQ, real_BQ)
        by_slot = by_slot and first_call  # of keys in a cache, only the padding mask knows
    _refuse_irregular_cache(cache, seen, order, needs.distances)
    if given is not None and needs.distances and not first_call:
        _refuse_jump(cache, queries_BQ.expand(rows, -1), visible_BK, seen)

    key_length, keys_BK = _key_length(cache, seen, num_queries), None
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
        mask = _separate(order, queries_BQ.expand(rows, -1), mask, padding, config, causal, dtype)
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
        cache_filled_at=getattr(cache, "posenc_filled_at", None),
        packed=order in (Order.RESTARTS, Order.UNKNOWN),
        dtype=torch.float64 if dtype == torch.float64 else torch.float32,
        keys_BK=keys_BK,
    )
    everything = _all_positions(cache, queries_BQ.expand(rows, -1), seen) if needs.distances else None
    return Located(positions, mask, order, seen, visible_BK, pairs, everything)


def annotate_cache(outputs: Any, located: Located, length_matters: bool) -> None:
    """Leave on the cache what a later call could not work out from its padding alone."""
    if tracing():
        return
    irregular = located.order in (Order.GAPS, Order.RESTARTS)
    first = length_matters and not located.positions.cached
    for own in caches_of(outputs):
        if irregular or hasattr(own, "posenc_order"):
            own.posenc_order = located.order
        if first:
            own.posenc_filled_at = located.positions.length()
        if located.all_BK is not None:
            own.posenc_positions = located.all_BK


def caches_of(outputs: Any) -> list[Any]:
    """The caches of self-attention among a model's outputs: one, or none."""
    cache = outputs.get("past_key_values") if isinstance(outputs, dict) else None
    found = [cache] if cache is not None else outputs if isinstance(outputs, tuple) else []
    return [self_attention_cache(output) for output in found if hasattr(output, "get_seq_length")]


def tokens_of(inputs: dict[str, Any]) -> torch.Tensor:
    """Something with the shape of the token ids, also where embeddings were passed instead."""
    return inputs["input_ids"] if inputs.get("input_ids") is not None else inputs["inputs_embeds"][..., 0]


def self_attention_cache(cache: Any) -> Any:
    """Of the cache of a decoder with cross-attention, the part that self-attention uses."""
    return getattr(cache, "self_attention_cache", cache)


def _seen(cache: Any) -> int | torch.Tensor:
    """How many slots the cache has filled. A static cache counts in a tensor, which tracing cannot read."""
    seen = cache.get_seq_length() if cache is not None else 0
    if isinstance(seen, torch.Tensor):
        return seen.clone() if tracing() else int(seen)
    return seen


def slots_of(cache: Any) -> int | None:
    """How many slots a static cache has; None for a cache that grows."""
    limit = getattr(cache, "get_max_length", None) or cache.get_max_cache_shape
    longest = limit(0)  # of the first layer: a cache that has none yet has no limit
    return longest if longest is not None and longest > 0 else None


def _key_length(cache: Any, seen: int | torch.Tensor, num_queries: int) -> int:
    """How many keys attention will see: a static cache hands out all its slots, filled or not."""
    slots = slots_of(cache) if cache is not None else None
    if slots is not None:
        return slots
    assert isinstance(seen, int)
    return seen + num_queries


def _leading_padding(padding: torch.Tensor) -> torch.Tensor:
    return (padding.cumsum(-1) == 0).sum(-1, keepdim=True)


def _seen_by_each(mask: Any) -> torch.Tensor | None:
    """(B, Q, K): the keys that a 4D mask shows to each query. generate() prepares such masks for static caches."""
    if not isinstance(mask, torch.Tensor):
        return None
    visible = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2
    return visible.any(1)


def _at_slots(visible_BK: torch.Tensor | None, seen: int | torch.Tensor, num_queries: int) -> torch.Tensor | None:
    """(B, Q): which of the new tokens are visible, that is not padding."""
    if visible_BK is None:
        return None
    if isinstance(seen, int) and visible_BK.shape[-1] < seen + num_queries:
        raise ValueError(
            f"attention_mask covers {visible_BK.shape[-1]} tokens, but {seen} cached and {num_queries} new ones are to "
            "be attended to: pass the mask of all of them"
        )
    slots = torch.arange(num_queries, device=visible_BK.device) + seen
    return visible_BK.index_select(1, slots)


def _survey(queries: torch.Tensor, slots: torch.Tensor, real: torch.Tensor | None) -> tuple[Order, bool]:
    """How explicit positions run, and whether they run along with the slots. Reads three flags off the device."""
    if queries.shape[-1] == 1:
        return Order.STEADY, True
    if tracing():
        return Order.UNKNOWN, False
    if real is None:
        real = torch.ones_like(queries, dtype=torch.bool)
    queries = queries.expand(real.shape[0], -1)

    def constant(shift: torch.Tensor) -> torch.Tensor:
        low = shift.masked_fill(~real, torch.iinfo(shift.dtype).max).amin(-1)
        high = shift.masked_fill(~real, torch.iinfo(shift.dtype).min).amax(-1)
        return ((low >= high) | ~real.any(-1)).all()

    flags = torch.stack(
        [constant(queries - slots), constant(queries - real.cumsum(-1)), ~document_starts(queries, real).any()]
    )
    by_slot, by_count, one_document = flags.tolist()
    order = Order.STEADY if by_count else Order.GAPS if one_document else Order.RESTARTS
    return order, by_slot


def document_starts(queries: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
    """True at each real token whose position is below that of the real token before it, or zero a second time."""
    slots = torch.arange(queries.shape[-1], device=queries.device).expand_as(queries)
    last_real = torch.where(real, slots, -1).cummax(-1).values
    last_real = torch.nn.functional.pad(last_real[:, :-1], (1, 0), value=-1)
    before = queries.gather(1, last_real.clamp(min=0))
    falls = (queries < before) | ((queries == 0) & (before == 0))
    return falls & real & (last_real >= 0)


def _refuse_irregular_cache(cache: Any, seen: Any, order: Order, needs_distances: bool) -> None:
    if cache is None or (isinstance(seen, int) and seen == 0):
        return
    earlier = getattr(cache, "posenc_order", Order.STEADY)
    if Order.RESTARTS in (order, earlier):
        raise ValueError(
            "rows that hold several documents (position_ids that restart) cannot be continued from a cache: pass "
            "use_cache=False and the whole rows, or one document a row"
        )
    if needs_distances and Order.GAPS in (order, earlier):
        raise ValueError(
            "this position scheme needs the distance to every cached key, and position_ids with gaps do not say "
            "where cached keys stand: pass use_cache=False and the whole rows, or position_ids without gaps"
        )


def _all_positions(cache: Any, queries: torch.Tensor, seen: int | torch.Tensor) -> torch.Tensor | None:
    if not isinstance(seen, int):
        return None
    if seen == 0:
        return queries
    earlier = getattr(cache, "posenc_positions", None)
    if earlier is None or earlier.shape[0] != queries.shape[0] or earlier.shape[1] < seen:
        return None
    return torch.cat([earlier[:, :seen].to(queries.device), queries], dim=-1)


def _refuse_jump(cache: Any, queries: torch.Tensor, visible_BK: torch.Tensor | None, seen: Any) -> None:
    """Later, keys are placed by counting back from the queries: that is right only if these go on where keys ended."""
    everything = _all_positions(cache, queries, seen)
    if everything is None or tracing():
        return
    visible = torch.ones_like(everything, dtype=torch.bool)
    if visible_BK is not None:
        visible = visible_BK[:, : everything.shape[1]].expand_as(everything)
    places = torch.arange(everything.shape[1], device=everything.device)
    last = torch.where(visible & (places < seen), places, -1).amax(-1, keepdim=True)
    first = torch.where(visible & (places >= seen), places, everything.shape[1]).amin(-1, keepdim=True)
    comparable = (last >= 0) & (first < everything.shape[1])
    step = everything.gather(1, first.clamp(max=everything.shape[1] - 1)) - everything.gather(1, last.clamp(min=0))
    if bool((comparable & (step != 1)).any()):
        raise ValueError(
            "position_ids do not go on where the cached tokens ended, and this position scheme needs the distance to "
            "each of them: pass use_cache=False and the whole rows, or position_ids that go on by one"
        )


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


def _separate(
    order: Order, queries: torch.Tensor, mask: Any, padding: Any, config: Any, causal: bool, dtype: torch.dtype
) -> Any:
    """The mask with which no token sees another document of its row, and gaps are not taken for documents."""
    implementation = config._attn_implementation
    if order is Order.STEADY:
        return mask
    if order is Order.GAPS:  # transformers takes a gap for a new document unless there is a padding mask
        return mask if mask is not None else torch.ones_like(queries)
    if is_flash_attention_requested(requested_attention_implementation=implementation):
        if order is Order.RESTARTS and (queries.shape[0] > 1 or padding is not None):
            raise ValueError(
                "flash attention takes packed rows (position_ids that restart) only as a single row without an "
                'attention mask: flatten the batch, or use attn_implementation="sdpa"'
            )
        return mask
    real = torch.ones_like(queries, dtype=torch.bool) if padding is None else padding
    documents = document_starts(queries, real).cumsum(-1)
    visible = (documents[:, :, None] == documents[:, None, :]) & real[:, None, :]
    if causal:
        visible = visible & torch.ones(visible.shape[-2:], dtype=torch.bool, device=visible.device).tril()
    visible = visible[:, None]
    if implementation == "sdpa":
        return visible
    zero = torch.zeros((), dtype=dtype, device=visible.device)
    return torch.where(visible, zero, torch.finfo(dtype).min)
