"""Which of the new tokens are padding, for schemes that sum over the tokens between a query and a key.

Such a sum is the same for all queries that are after the last of these tokens. So each query must see all tokens from
the first one that it sees up to itself: a causal mask, padding, packed documents and sliding windows are like that.

Shape legend: B batch, H heads, Q new tokens, K keys.
"""

from __future__ import annotations

from typing import Any

import torch

from ..errors import PosEncError
from ..schemes import is_tracing
from .masks import visible_keys


def new_tokens(
    attention_mask: Any, padding_BK: torch.Tensor | None, num_cached: int | torch.Tensor, num_queries: int
) -> torch.Tensor | None:
    """(B, H or 1, Q): True at new tokens that are not padding; None if all are tokens.

    Args:
        attention_mask: The mask that the model was given: a tensor, one for each type of layer, or None.
        padding_BK: The same mask, if it only says which tokens are padding.
        num_cached: The number of tokens in the cache.
        num_queries: The number of new tokens.

    Returns:
        The mask of the new tokens.

    Raises:
        PosEncError: If the mask cannot be read, or hides tokens between a query and a key that it sees.
    """
    if padding_BK is not None:
        return _columns(padding_BK[:, None], num_cached, num_queries)
    if isinstance(attention_mask, dict):  # generate() prepares one mask per type of layer
        attention_mask = attention_mask.get("full_attention", next(iter(attention_mask.values()), None))
    if attention_mask is None:
        return None
    if not isinstance(attention_mask, torch.Tensor):
        raise PosEncError(
            "this position scheme sums over the tokens between query and key, so it has to read the attention mask: "
            "pass a tensor, not a BlockMask"
        )
    visible_BHQK = visible_keys(attention_mask)
    tokens_BHK = visible_BHQK.any(2)
    if not is_tracing():
        _check_contiguous(visible_BHQK, tokens_BHK, num_cached, num_queries)
    return _columns(tokens_BHK, num_cached, num_queries)


def _first_slot(num_keys: int, num_cached: int | torch.Tensor, num_queries: int) -> int | torch.Tensor:
    """Where the new tokens start: after the cached ones; in a full window, they are the last ones."""
    last_start = num_keys - num_queries
    return min(num_cached, last_start) if isinstance(num_cached, int) else num_cached.clamp(max=last_start)


def _columns(values_BHK: torch.Tensor, num_cached: int | torch.Tensor, num_queries: int) -> torch.Tensor:
    first = _first_slot(values_BHK.shape[-1], num_cached, num_queries)
    if isinstance(first, int):
        return values_BHK.narrow(-1, first, num_queries)
    return values_BHK.index_select(-1, torch.arange(num_queries, device=values_BHK.device) + first)


def _check_contiguous(
    visible_BHQK: torch.Tensor, tokens_BHK: torch.Tensor, num_cached: int | torch.Tensor, num_queries: int
) -> None:
    """Refuse a mask that shows a query later tokens, or not all tokens from the first one it sees up to itself."""
    num_keys, device = visible_BHQK.shape[-1], visible_BHQK.device
    keys = torch.arange(num_keys, device=device)
    queries = torch.arange(num_queries, device=device)[:, None] + _first_slot(num_keys, num_cached, num_queries)
    is_later = keys > queries
    is_after_first = visible_BHQK.to(torch.uint8).cummax(-1).values.bool()
    is_hidden_between = is_after_first & ~visible_BHQK & tokens_BHK[:, :, None, :] & ~is_later
    if bool(((visible_BHQK & is_later) | is_hidden_between).any()):
        raise PosEncError(
            "this position scheme sums over the tokens between query and key, but the attention mask shows a query "
            "later tokens, or hides some of those between: use a causal mask, and position_ids that restart for packed "
            "documents"
        )
