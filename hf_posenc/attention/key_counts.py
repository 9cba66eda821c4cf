"""How many keys each query sees: counted from masks and slots, without a matrix of queries and keys.

Shape legend: B batch, H heads, Q queries, K keys.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn.functional import pad

from ..errors import PosEncError
from .masks import PositionOrder, Window, document_starts, visible_keys

if TYPE_CHECKING:
    from .positions import TokenLayout


def key_counts(
    attention_mask: object, layout: TokenLayout, causal: bool, window: Window | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The number of keys that each query sees, itself included; at least one.

    Args:
        attention_mask: The mask that the model was called with; a dict has one for each type of layer.
        layout: The tokens of this forward pass.
        causal: Whether queries see no later key.
        window: The model's sliding window, if it has one.

    Returns:
        The counts, (B or 1, H or 1, Q), and those in layers with the window, if there are any.

    Raises:
        PosEncError: If the mask is a BlockMask.
    """
    masks = attention_mask if isinstance(attention_mask, dict) else None
    full = masks.get("full_attention") if masks is not None else attention_mask
    counts = _counts(full, layout, causal, None)
    if window is None:
        return counts, None
    windowed = masks.get("sliding_attention") if masks is not None else attention_mask
    return counts, _counts(windowed, layout, causal, window.size)


def _counts(mask: object, layout: TokenLayout, causal: bool, window_size: int | None) -> torch.Tensor:
    if mask is not None and not isinstance(mask, torch.Tensor):
        raise PosEncError(
            "this position scheme counts the keys that a query sees, so the attention mask must be a tensor, not a "
            "BlockMask (which generate() makes for static caches under flex_attention)"
        )
    if mask is not None and mask.dim() == 4:
        return visible_keys(mask).sum(-1).clamp(min=1)
    visible_BK = token_columns(layout)
    start_BQ, stop_BQ = visible_spans(layout, visible_BK, causal)
    if window_size is not None:
        slots_BQ = query_slots(layout, visible_BK.shape[0])
        # In slots, as stock masks count.
        start_BQ = torch.maximum(start_BQ, slots_BQ - (window_size - 1 if causal else window_size))
        stop_BQ = torch.minimum(stop_BQ, slots_BQ + 1 + (0 if causal else window_size))
    before_BK = pad(visible_BK.cumsum(-1), (1, 0))
    counts_BQ = before_BK.gather(1, stop_BQ) - before_BK.gather(1, start_BQ)
    return counts_BQ.clamp(min=1)[:, None]


def token_columns(layout: TokenLayout) -> torch.Tensor:
    """(B, K): which of the keys so far are tokens; after a first call, also the slots that are still empty."""
    num_queries = layout.queries_BQ.shape[-1]
    num_keys = num_queries if layout.is_first_call else layout.key_length
    if layout.visible_BK is None:
        rows = layout.queries_BQ.shape[0]
        return torch.ones(rows, num_keys, dtype=torch.bool, device=layout.queries_BQ.device)
    visible_BK = layout.visible_BK[:, :num_keys]
    if isinstance(layout.num_cached, int) and visible_BK.shape[1] < layout.num_cached + num_queries:
        raise PosEncError(
            f"attention_mask covers {visible_BK.shape[1]} tokens, but there are {layout.num_cached} cached and "
            f"{num_queries} new ones: pass the mask of all of them"
        )
    return visible_BK.expand(max(len(visible_BK), len(layout.queries_BQ)), -1)


def query_slots(layout: TokenLayout, batch_size: int) -> torch.Tensor:
    """(B, Q): the slots of the new tokens."""
    num_queries = layout.queries_BQ.shape[-1]
    slots = torch.arange(num_queries, device=layout.queries_BQ.device) + layout.num_cached
    return slots.expand(batch_size, -1)


def visible_spans(layout: TokenLayout, visible_BK: torch.Tensor, causal: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The first slot that each new token can see, and the one after the last."""
    num_queries = layout.queries_BQ.shape[-1]
    slots_BQ = query_slots(layout, visible_BK.shape[0])
    start_BQ = torch.zeros_like(slots_BQ)
    stop_BQ = slots_BQ + 1 if causal else torch.full_like(slots_BQ, visible_BK.shape[1])
    if layout.order not in (PositionOrder.PACKED, PositionOrder.UNKNOWN) or not layout.is_first_call:
        return start_BQ, stop_BQ
    # Packed rows never continue a cache (that is refused), so slots count from the start of the row.
    starts_BQ = document_starts(layout.queries_BQ.expand(len(visible_BK), -1), visible_BK)
    start_BQ = torch.where(starts_BQ, slots_BQ, 0).cummax(-1).values
    if not causal:
        next_start_BQ = pad(torch.where(starts_BQ, slots_BQ, num_queries)[:, 1:], (0, 1), value=num_queries)
        stop_BQ = next_start_BQ.flip(-1).cummin(-1).values.flip(-1)
    return start_BQ, stop_BQ
