"""KV caches: how far they are filled, what hf_posenc stores in them, and when they cannot be continued.

Shape legend: B batch, Q new tokens, K all tokens so far, E hidden size, F = E + 1.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch.nn.functional import pad
from transformers import Cache
from transformers.cache_utils import DynamicLayer, StaticLayer
from transformers.utils import ModelOutput

from ..errors import PosEncError
from ..schemes import is_tracing
from .key_counts import visible_spans
from .masks import PositionOrder

if TYPE_CHECKING:
    from .positions import ResolvedPositions, TokenLayout


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


def annotate_caches(
    past_key_values: Cache | None,
    outputs: ModelOutput | tuple[object, ...],
    resolved: ResolvedPositions,
    depends_on_length: bool,
    num_layers: int,
) -> None:
    """Record on the cache that a forward pass filled, if any, what later calls cannot infer from their own inputs."""
    candidates: Iterable[object] = outputs if isinstance(outputs, tuple) else [outputs.get("past_key_values")]
    if past_key_values is not None:  # with use_cache=False, some models fill the cache but do not return it
        candidates = [past_key_values]
    for candidate in candidates:
        if not hasattr(candidate, "get_seq_length"):
            continue
        cache = self_attention_cache(candidate)
        assert cache is not None
        if not is_tracing():
            record = cache.posenc_record = cache_record(cache)
            record.order = resolved.layout.order
            if depends_on_length and not resolved.positions.cached:
                record.prefill_length = resolved.positions.length()
            if resolved.layout.all_positions_BK is not None:
                record.positions_BK = resolved.layout.all_positions_BK
        if resolved.context_embeds_BQE is not None:
            _store_embeds(cache, resolved.context_embeds_BQE, num_layers)


def _store_embeds(cache: Cache, inputs_embeds_BQE: torch.Tensor, num_layers: int) -> None:
    """Store word embeddings as the keys of an extra layer: beam reordering and cropping then apply to them too."""
    if len(cache.layers) == num_layers:
        slots = static_cache_length(cache)
        layer = DynamicLayer() if slots is None else StaticLayer(max_cache_len=slots)
        layer.stores_inputs_embeds = True
        cache.layers.append(layer)
    embeds_B1QE = inputs_embeds_BQE.unsqueeze(1)
    cache.layers[num_layers].update(embeds_B1QE, embeds_B1QE[..., :1])


def self_attention_cache(cache: Cache | None) -> Cache | None:
    """The self-attention cache of an encoder-decoder cache; any other cache as it is."""
    return getattr(cache, "self_attention_cache", cache)


def static_cache_length(cache: Cache) -> int | None:
    """The number of slots of a static cache; None for a cache that grows."""
    static = [layer for layer in cache.layers if isinstance(layer, StaticLayer) and not layer.is_sliding]
    return static[0].max_cache_len if static else None


def check_no_static_window(cache: Cache | None) -> None:
    """Refuse a static cache of sliding windows: keys move between its slots, so their positions are unknown."""
    if cache is not None and any(isinstance(layer, StaticLayer) and layer.is_sliding for layer in cache.layers):
        raise PosEncError(
            "the position of every cached key is needed here (for this scheme, or by position_ids with gaps), but a "
            "static cache with sliding windows moves keys between slots: use a DynamicCache"
        )


def cache_lengths(past_key_values: Cache | None, num_queries: int) -> tuple[Cache | None, int | torch.Tensor, int]:
    """The self-attention cache, its number of filled slots, and the number of keys that attention gets.

    While a static cache is traced, the number of filled slots is a tensor.
    """
    cache = getattr(past_key_values, "self_attention_cache", past_key_values)
    if cache is None:
        return None, 0, num_queries
    num_cached: int | torch.Tensor = cache.get_seq_length()
    if isinstance(num_cached, torch.Tensor):
        num_cached = num_cached.clone() if is_tracing() else int(num_cached)
    num_slots = static_cache_length(cache)  # a static cache returns all its slots, filled or not
    if num_slots is None:  # a tensor only in static caches of windows, which are refused if the length matters
        num_slots = num_cached + num_queries if isinstance(num_cached, int) else num_queries
    return cache, num_cached, num_slots


def check_cache_order(cache: Cache | None, order: PositionOrder, needs_distances: bool) -> None:
    """Refuse to continue a cache where positions with gaps or restarts leave the cached positions undefined."""
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
    cached_BK = cache_record(cache).positions_BK
    if cached_BK is None or cached_BK.shape[0] != positions_BQ.shape[0] or cached_BK.shape[1] < past_length:
        return None
    return torch.cat([cached_BK[:, :past_length].to(positions_BQ.device), positions_BQ], dim=-1)


def check_continues(
    positions_BK: torch.Tensor, visible_BK: torch.Tensor | None, past_length: int | torch.Tensor
) -> None:
    """Refuse positions that do not continue the cached ones: cached keys are located by counting back from them."""
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


def running_mean_embeds(
    inputs_embeds_BQE: torch.Tensor, layout: TokenLayout, num_layers: int, causal: bool
) -> torch.Tensor:
    """(B, Q, E): the mean of the word embeddings each new token can see: its document, up to itself if causal."""
    embeds_BKE = inputs_embeds_BQE
    if not layout.is_first_call:
        assert layout.cache is not None
        embeds_BKE = _concat_cached_embeds(inputs_embeds_BQE, layout.num_cached, layout.cache, num_layers)
    # Differences of long sums: in float64, where the device supports it.
    embeds_BKE = embeds_BKE.to(torch.float32 if inputs_embeds_BQE.device.type == "mps" else torch.float64)
    if layout.visible_BQK is not None:
        num_keys = min(embeds_BKE.shape[1], layout.visible_BQK.shape[-1])
        weights_BQK = layout.visible_BQK[..., :num_keys].to(embeds_BKE)
        return weights_BQK.matmul(embeds_BKE[:, :num_keys]) / weights_BQK.sum(-1, keepdim=True).clamp(min=1)
    batch, num_keys, _ = embeds_BKE.shape
    visible_BK = torch.ones(batch, num_keys, dtype=torch.bool, device=embeds_BKE.device)
    if layout.visible_BK is not None:
        visible_BK = layout.visible_BK[:, :num_keys].expand(batch, -1)
    num_keys = visible_BK.shape[1]
    with_count_BKF = pad(embeds_BKE[:, :num_keys], (0, 1), value=1.0)  # a column of ones counts the visible tokens
    sums_BKF = pad((with_count_BKF * visible_BK.unsqueeze(-1)).cumsum(1), (0, 0, 1, 0))
    start_BQ, stop_BQ = visible_spans(layout, visible_BK, causal)

    def sum_before(slots_BQ: torch.Tensor) -> torch.Tensor:
        return sums_BKF.gather(1, slots_BQ.unsqueeze(-1).expand(-1, -1, sums_BKF.shape[-1]))

    span_sums_BQF = sum_before(stop_BQ) - sum_before(start_BQ)
    return span_sums_BQF[..., :-1] / span_sums_BQF[..., -1:].clamp(min=1)


def _concat_cached_embeds(
    inputs_embeds_BQE: torch.Tensor, past_length: int | torch.Tensor, cache: Cache, num_layers: int
) -> torch.Tensor:
    """(B, K, E): the embeddings in the cache, followed by the new ones."""
    layer = cache.layers[num_layers] if len(cache.layers) > num_layers else None
    if (
        layer is None
        or not hasattr(layer, "stores_inputs_embeds")
        or (not is_tracing() and int(layer.get_seq_length()) != int(past_length))
    ):
        raise PosEncError(
            'query="context" needs the mean of all word embeddings so far, but this cache does not store those of all '
            "earlier calls: it was built by hand or filled by another model. Pass whole rows with use_cache=False"
        )
    cached_BKE: torch.Tensor = layer.keys[:, 0]
    if static_cache_length(cache) is None:
        return torch.cat([cached_BKE.to(inputs_embeds_BQE.device), inputs_embeds_BQE], dim=1)
    slots = torch.arange(inputs_embeds_BQE.shape[1], device=inputs_embeds_BQE.device) + past_length
    return cached_BKE.index_copy(1, slots, inputs_embeds_BQE.to(cached_BKE.dtype))
