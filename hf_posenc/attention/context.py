"""The mean of the word embeddings a token can see: those of its document, up to the token itself in causal models.

A cache stores the embeddings of earlier calls as the keys of one extra layer, so that beam reordering, cropping and
repeating rows apply to them too.

Shape legend: B batch, Q new tokens, K all tokens so far, E hidden size, F = E + 1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn.functional import pad
from transformers import Cache
from transformers.cache_utils import DynamicLayer, StaticLayer

from ..errors import PosEncError
from ..schemes import is_tracing
from .cache import static_cache_length
from .masks import PositionOrder, document_starts

if TYPE_CHECKING:
    from .positions import TokenLayout


def running_mean_embeds(
    inputs_embeds_BQE: torch.Tensor, layout: TokenLayout, num_layers: int, causal: bool
) -> torch.Tensor:
    """(B, Q, E): the mean embedding each new token can see; the layout's cache is not yet updated.

    Computed as differences of long sums: in float64, where the device supports it.
    """
    embeds_BKE = inputs_embeds_BQE
    if not layout.is_first_call:
        assert layout.cache is not None
        embeds_BKE = _concat_cached_embeds(inputs_embeds_BQE, layout.num_cached, layout.cache, num_layers)
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
    start_BQ, stop_BQ = _visible_spans(inputs_embeds_BQE, layout, visible_BK, causal)

    def sum_before(slots_BQ: torch.Tensor) -> torch.Tensor:
        return sums_BKF.gather(1, slots_BQ.unsqueeze(-1).expand(-1, -1, sums_BKF.shape[-1]))

    span_sums_BQF = sum_before(stop_BQ) - sum_before(start_BQ)
    return span_sums_BQF[..., :-1] / span_sums_BQF[..., -1:].clamp(min=1)


def _visible_spans(
    inputs_embeds_BQE: torch.Tensor, layout: TokenLayout, visible_BK: torch.Tensor, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """The first slot that each token can see, and the one after the last."""
    batch, num_queries, _ = inputs_embeds_BQE.shape
    slots_BQ = (torch.arange(num_queries, device=inputs_embeds_BQE.device) + layout.num_cached).expand(batch, -1)
    start_BQ = torch.zeros_like(slots_BQ)
    stop_BQ = slots_BQ + 1 if causal else torch.full_like(slots_BQ, visible_BK.shape[1])
    if layout.order not in (PositionOrder.PACKED, PositionOrder.UNKNOWN):
        return start_BQ, stop_BQ
    # Packed rows never continue a cache (that is refused), so slots count from the start of the row.
    starts_BQ = document_starts(layout.queries_BQ.expand(batch, -1), visible_BK)
    start_BQ = torch.where(starts_BQ, slots_BQ, 0).cummax(-1).values
    if not causal:
        next_start_BQ = pad(torch.where(starts_BQ, slots_BQ, num_queries)[:, 1:], (0, 1), value=num_queries)
        stop_BQ = next_start_BQ.flip(-1).cummin(-1).values.flip(-1)
    return start_BQ, stop_BQ


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


def cache_embeds(cache: Cache, inputs_embeds_BQE: torch.Tensor, num_layers: int) -> None:
    """Store the word embeddings of this forward in the cache that it filled."""
    if len(cache.layers) == num_layers:
        slots = static_cache_length(cache)
        layer = DynamicLayer() if slots is None else StaticLayer(max_cache_len=slots)
        layer.stores_inputs_embeds = True
        cache.layers.append(layer)
    embeds_B1QE = inputs_embeds_BQE.unsqueeze(1)
    cache.layers[num_layers].update(embeds_B1QE, embeds_B1QE[..., :1])
