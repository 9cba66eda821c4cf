"""The mean of the words that a token may know of: of its document, and in causal models up to the token itself.

A cache keeps the words of earlier calls as the keys of one layer more than the model has, so that whatever is done to
the cache (beams reordered, tokens cropped, rows repeated) is done to them as well.

Shape legend: B batch, Q new tokens, K all tokens so far, E width of the model.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import pad
from transformers.cache_utils import DynamicLayer, StaticLayer

from ..schemes.inputs import is_tracing
from .cache import static_cache_length
from .documents import PositionOrder, document_starts
from .positions import ResolvedPositions

FOREIGN_CACHE = (
    'query="context" asks with the mean of all words so far, and this cache does not hold those of all earlier calls: '
    "it was filled by another model, or made by hand; pass use_cache=False and the whole rows"
)


def running_mean_embeds(
    inputs_embeds_BQE: torch.Tensor, located: ResolvedPositions, cache: Any, num_layers: int, causal: bool
) -> torch.Tensor:
    """(B, Q, E). `cache` is the one passed in, if any, before this forward changes it.

    Long sums whose differences count: in float64, where the device has it.
    """
    inputs_embeds_BKE = inputs_embeds_BQE
    if not (isinstance(located.seen, int) and located.seen == 0):
        inputs_embeds_BKE = _with_earlier(inputs_embeds_BQE, located.seen, cache, num_layers)
    inputs_embeds_BKE = inputs_embeds_BKE.to(torch.float32 if inputs_embeds_BQE.device.type == "mps" else torch.float64)
    if located.visible_BQK is not None:
        return _mean_by_mask(inputs_embeds_BKE, located.visible_BQK)
    batch, num_keys, _ = inputs_embeds_BKE.shape
    visible_BK = torch.ones(batch, num_keys, dtype=torch.bool, device=inputs_embeds_BKE.device)
    if located.visible_BK is not None:
        visible_BK = located.visible_BK[:, :num_keys].expand(batch, -1)
    num_keys = visible_BK.shape[1]
    counted_BKF = pad(inputs_embeds_BKE[:, :num_keys], (0, 1), value=1.0) * visible_BK.unsqueeze(
        -1
    )  # a one more, to count
    sums_BKF = pad(counted_BKF.cumsum(1), (0, 0, 1, 0))
    first_BQ, last_BQ = _document_ends(inputs_embeds_BQE, located, visible_BK, causal)

    def upto(places_BQ: torch.Tensor) -> torch.Tensor:
        return sums_BKF.gather(1, places_BQ.unsqueeze(-1).expand(-1, -1, sums_BKF.shape[-1]))

    within_BQF = upto(last_BQ) - upto(first_BQ)
    return within_BQF[..., :-1] / within_BQF[..., -1:].clamp(min=1)


def _mean_by_mask(inputs_embeds_BKE: torch.Tensor, visible_BQK: torch.Tensor) -> torch.Tensor:
    num_keys = min(inputs_embeds_BKE.shape[1], visible_BQK.shape[-1])
    weights_BQK = visible_BQK[..., :num_keys].to(inputs_embeds_BKE)
    return weights_BQK.matmul(inputs_embeds_BKE[:, :num_keys]) / weights_BQK.sum(-1, keepdim=True).clamp(min=1)


def _document_ends(
    inputs_embeds_BQE: torch.Tensor, located: ResolvedPositions, visible_BK: torch.Tensor, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """For each token the slot where what it knows of begins, and the one before which it ends."""
    batch, num_queries, _ = inputs_embeds_BQE.shape
    slots_BQ = (torch.arange(num_queries, device=inputs_embeds_BQE.device) + located.seen).expand(batch, -1)
    first_BQ = torch.zeros_like(slots_BQ)
    last_BQ = slots_BQ + 1 if causal else torch.full_like(slots_BQ, visible_BK.shape[1])
    if located.order not in (PositionOrder.RESTARTS, PositionOrder.UNKNOWN):
        return first_BQ, last_BQ
    # Rows of several documents never come with a cache: that is refused. So slots are counted from the row's start.
    starts_BQ = document_starts(located.positions.queries_BQ.expand(batch, -1), visible_BK)
    first_BQ = torch.where(starts_BQ, slots_BQ, 0).cummax(-1).values
    if not causal:
        later = pad(torch.where(starts_BQ, slots_BQ, num_queries)[:, 1:], (0, 1), value=num_queries)
        last_BQ = later.flip(-1).cummin(-1).values.flip(-1)
    return first_BQ, last_BQ


def _with_earlier(
    inputs_embeds_BQE: torch.Tensor, seen: int | torch.Tensor, cache: Any, num_layers: int
) -> torch.Tensor:
    """(B, K, E): the words in the cache, and the new ones after them."""
    layer = cache.layers[num_layers] if len(cache.layers) > num_layers else None
    if layer is None or not hasattr(layer, "holds_words"):
        raise ValueError(FOREIGN_CACHE)
    if not is_tracing() and int(layer.get_seq_length()) != int(seen):
        raise ValueError(FOREIGN_CACHE)
    earlier_BKE = layer.keys[:, 0]
    if static_cache_length(cache) is None:
        return torch.cat([earlier_BKE.to(inputs_embeds_BQE.device), inputs_embeds_BQE], dim=1)
    slots = torch.arange(inputs_embeds_BQE.shape[1], device=inputs_embeds_BQE.device) + seen
    return earlier_BKE.index_copy(1, slots, inputs_embeds_BQE.to(earlier_BKE.dtype))


def cache_embeds(cache: Any, inputs_embeds_BQE: torch.Tensor, num_layers: int) -> None:
    """Put the words of this forward into the cache that it filled."""
    if len(cache.layers) == num_layers:
        slots = static_cache_length(cache)
        layer = DynamicLayer() if slots is None else StaticLayer(max_cache_len=slots)
        layer.holds_words = True
        cache.layers.append(layer)
    words_B1QE = inputs_embeds_BQE.unsqueeze(1)
    cache.layers[num_layers].update(words_B1QE, words_B1QE[..., :1])
