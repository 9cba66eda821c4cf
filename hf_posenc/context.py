"""The mean of the words that a token may know of: of its document, and in causal models up to the token itself.

A cache keeps the words of earlier calls as the keys of one layer more than the model has, so that whatever is done to
the cache (beams reordered, tokens cropped, rows repeated) is done to them as well.

Shape legend: B batch, Q new tokens, K all tokens so far, E width of the model.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import DynamicLayer, StaticLayer

from .positions import Located, Order, document_starts, slots_of


def mean_of_words(words_BQE: torch.Tensor, located: Located, cache: Any, num_layers: int, causal: bool) -> torch.Tensor:
    """(B, Q, E), in float32 or wider. `cache` is the one passed in, if any, before this forward changes it."""
    wide = torch.promote_types(words_BQE.dtype, torch.float32)
    seen, num_queries = located.seen, words_BQE.shape[1]
    words_BKE = words_BQE if isinstance(seen, int) and seen == 0 else _with_earlier(words_BQE, seen, cache, num_layers)
    num_keys = words_BKE.shape[1]
    visible_BK = torch.ones(1, num_keys, dtype=torch.bool, device=words_BQE.device)
    if located.visible_BK is not None:
        visible_BK = located.visible_BK[:, :num_keys]
    slots = torch.arange(num_queries, device=words_BQE.device) + seen
    before_BK1 = torch.nn.functional.pad(visible_BK.to(wide).cumsum(1), (1, 0)).unsqueeze(-1)
    masked_BKE = words_BKE[:, : visible_BK.shape[1]].to(wide) * visible_BK.unsqueeze(-1)
    sums_BKE = torch.nn.functional.pad(masked_BKE.cumsum(1), (0, 0, 1, 0))
    first, last = torch.zeros_like(slots)[None], slots[None] + 1
    if not causal:
        last = torch.full_like(first, visible_BK.shape[1])
    if located.order in (Order.RESTARTS, Order.UNKNOWN):  # never with a cache: that is refused
        starts_BQ = document_starts(
            located.positions.queries_BQ.expand(words_BQE.shape[0], -1), visible_BK.expand(words_BQE.shape[0], -1)
        )
        first = torch.where(starts_BQ, slots, 0).cummax(-1).values
        if not causal:
            ends = torch.nn.functional.pad(torch.where(starts_BQ, slots, num_queries)[:, 1:], (0, 1), value=num_queries)
            last = ends.flip(-1).cummin(-1).values.flip(-1)

    def between(cumulative: torch.Tensor) -> torch.Tensor:
        def at(places: torch.Tensor) -> torch.Tensor:
            rows, width = max(cumulative.shape[0], places.shape[0]), cumulative.shape[-1]
            index = places.expand(rows, -1).unsqueeze(-1).expand(-1, -1, width)
            return cumulative.expand(rows, -1, -1).gather(1, index)

        return at(last) - at(first)

    return between(sums_BKE) / between(before_BK1).clamp(min=1)


def _with_earlier(words_BQE: torch.Tensor, seen: int | torch.Tensor, cache: Any, num_layers: int) -> torch.Tensor:
    """(B, K, E): the words in the cache, and the new ones after them."""
    if len(cache.layers) <= num_layers:
        raise ValueError(
            'query="context" asks with the mean of all words so far, and this cache does not hold those of earlier '
            "calls: it was filled by another model, or made by hand; pass use_cache=False and the whole rows"
        )
    earlier_BKE = cache.layers[num_layers].keys[:, 0]
    if slots_of(cache) is None:
        return torch.cat([earlier_BKE.to(words_BQE.device), words_BQE], dim=1)
    slots = torch.arange(words_BQE.shape[1], device=words_BQE.device) + seen
    return earlier_BKE.index_copy(1, slots, words_BQE.to(earlier_BKE.dtype))


def remember_words(cache: Any, words_BQE: torch.Tensor, num_layers: int) -> None:
    """Put the words of this forward into the cache that it filled."""
    if len(cache.layers) == num_layers:
        slots = slots_of(cache)
        cache.layers.append(DynamicLayer() if slots is None else StaticLayer(max_cache_len=slots))
    words_B1QE = words_BQE.unsqueeze(1)
    cache.layers[num_layers].update(words_B1QE, words_B1QE[..., :1])
