"""Masks in the forms that backends want them in, and what they show.

Shape legend: B batch, H heads, Q queries, K keys.
"""

from __future__ import annotations

from typing import Any

import torch

MASKED_LOGIT = -1e3
"""A number added to the logits that hides a key: people write the lowest one there is, but also -1e4 or -1e9."""


def visible_keys(mask: torch.Tensor) -> torch.Tensor:
    """True where a mask, of truth values or to be added, shows a key."""
    return mask if mask.dtype == torch.bool else mask > MASKED_LOGIT


def apply_mask(bias: torch.Tensor, attention_mask: torch.Tensor | None, causal: bool) -> torch.Tensor:
    """The bias with the lowest finite number where there is nothing to see."""
    lowest = torch.finfo(bias.dtype).min
    if attention_mask is None:
        if not causal:
            return bias
        attention_mask = torch.ones(bias.shape[-2:], dtype=torch.bool, device=bias.device).tril()
    else:
        attention_mask = attention_mask[..., : bias.shape[-1]]
    if attention_mask.dtype == torch.bool:
        return torch.where(attention_mask, bias, lowest)
    return (bias + attention_mask.to(bias.dtype)).clamp(min=lowest)


def visible_pairs(attention_mask: Any, causal: bool, query: torch.Tensor, num_keys: int) -> torch.Tensor:
    """(B or 1, 1, Q, K): True where a query may see a key, whatever form the backend's mask has."""
    from torch.nn.attention.flex_attention import BlockMask, create_mask

    num_queries = query.shape[2]
    if isinstance(attention_mask, BlockMask):
        return create_mask(attention_mask.mask_mod, query.shape[0], 1, num_queries, num_keys, str(query.device))
    if attention_mask is None:
        everything = torch.ones(1, 1, num_queries, num_keys, dtype=torch.bool, device=query.device)
        return everything.tril() if causal else everything
    return visible_keys(attention_mask[..., :num_keys])
