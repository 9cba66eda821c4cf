"""Attention masks: what they show, how they join a bias, and how they keep packed documents apart.

A packed row holds several documents; a position that drops, or is zero again, starts a new one.

Shape legend: B batch, H heads, Q queries, K keys.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch
from transformers.utils.generic import is_flash_attention_requested

from ..errors import PosEncError
from ..schemes import is_tracing
from .block_masks import document_block_mask

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

AttentionMask: TypeAlias = "torch.Tensor | BlockMask | None"
"""Boolean (True: visible), additive, or flex_attention's block mask."""
MASKED_LOGIT = -1e3
"""An additive mask hides a key at or below this: masks use the dtype's minimum, but also -1e4 or -1e9."""


class Window(NamedTuple):
    """The sliding window of a model."""

    size: int
    has_full_layers: bool
    """Whether some layers have none, so that the model takes a mask by layer type."""


class PositionOrder(enum.Enum):
    """How the positions of the non-padding tokens progress along the rows."""

    CONTIGUOUS = "each position is one more than the previous one"
    GAPS = "positions increase, somewhere by more than one"
    PACKED = "positions restart: rows hold several documents"
    UNKNOWN = "positions cannot be read while tracing"


def visible_keys(mask: torch.Tensor) -> torch.Tensor:
    """True where a boolean or additive mask shows a key."""
    return mask if mask.dtype == torch.bool else mask > MASKED_LOGIT


def narrow_bias(bias: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A bias in the dtype of the kernels. An overflow in float16 would outweigh the mask of a hidden key."""
    if dtype == torch.float16:
        limit = torch.finfo(dtype).max / 2
        bias = bias.clamp(-limit, limit)
    return bias.to(dtype)


def apply_mask(bias: torch.Tensor, attention_mask: torch.Tensor | None, causal: bool) -> torch.Tensor:
    """The bias, with the dtype's lowest finite number at hidden keys."""
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


def visible_pairs(attention_mask: AttentionMask, causal: bool, query: torch.Tensor, num_keys: int) -> torch.Tensor:
    """(B or 1, 1, Q, K): True where a query may attend to a key, whatever form the backend's mask has."""
    from torch.nn.attention.flex_attention import BlockMask, create_mask

    num_queries = query.shape[2]
    if isinstance(attention_mask, BlockMask):
        return create_mask(attention_mask.mask_mod, query.shape[0], 1, num_queries, num_keys, str(query.device))
    if attention_mask is None:
        visible = torch.ones(1, 1, num_queries, num_keys, dtype=torch.bool, device=query.device)
        return visible.tril() if causal else visible
    return visible_keys(attention_mask[..., :num_keys])


def classify_positions(
    positions_BQ: torch.Tensor, slots_BQ: torch.Tensor, real_BQ: torch.Tensor | None
) -> tuple[PositionOrder, bool]:
    """The order of explicit positions, and whether they equal the slots up to a shift per row or document.

    Padding does not matter for the order. For the slots, only that before the first token does not: its queries see
    nothing, while the output at the end of a right-padded prompt is read by `generate`. In packed rows, which cannot be
    continued, no padding does.
    """
    if positions_BQ.shape[-1] == 1:
        return PositionOrder.CONTIGUOUS, True
    if is_tracing():
        return PositionOrder.UNKNOWN, False
    if real_BQ is None:
        real_BQ = torch.ones_like(positions_BQ, dtype=torch.bool)
    positions_BQ, real_BQ = torch.broadcast_tensors(positions_BQ, real_BQ)  # either may have one row for the batch

    counts_BQ, shifts_BQ = real_BQ.cumsum(-1), positions_BQ - slots_BQ
    starts_BQ, shift_changes_BQ = document_starts(positions_BQ, real_BQ), _changes(shifts_BQ, real_BQ)
    flags = [
        _is_constant(shifts_BQ, counts_BQ > 0),
        _is_constant(positions_BQ - counts_BQ, real_BQ),
        starts_BQ.any(),
        (starts_BQ | ~shift_changes_BQ).all(),
    ]
    matches_slots, contiguous, packed, matches_in_documents = torch.stack(flags).tolist()
    if contiguous:
        return PositionOrder.CONTIGUOUS, matches_slots
    return (PositionOrder.PACKED, matches_in_documents) if packed else (PositionOrder.GAPS, matches_slots)


def _is_constant(values_BQ: torch.Tensor, where_BQ: torch.Tensor) -> torch.Tensor:
    """Whether the values of each row are equal, where they matter."""
    limits = torch.iinfo(values_BQ.dtype)
    low = values_BQ.masked_fill(~where_BQ, limits.max).amin(-1)
    high = values_BQ.masked_fill(~where_BQ, limits.min).amax(-1)
    return ((low >= high) | ~where_BQ.any(-1)).all()


def document_starts(positions_BQ: torch.Tensor, real_BQ: torch.Tensor) -> torch.Tensor:
    """True where a document starts within a row: at real tokens whose position drops, or is zero again."""
    previous, follows = _previous_real(positions_BQ, real_BQ)
    return ((positions_BQ < previous) | ((positions_BQ <= 0) & (previous == positions_BQ))) & follows


def _changes(values_BQ: torch.Tensor, real_BQ: torch.Tensor) -> torch.Tensor:
    """True at real tokens whose value is not that of the real token before them."""
    previous, follows = _previous_real(values_BQ, real_BQ)
    return (values_BQ != previous) & follows


def _previous_real(values_BQ: torch.Tensor, real_BQ: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The value of the previous real token of the row, and where it counts: at all real tokens but the first."""
    slots = torch.arange(values_BQ.shape[-1], device=values_BQ.device).expand_as(values_BQ)
    previous_slot = torch.where(real_BQ, slots, -1).cummax(-1).values
    previous_slot = torch.nn.functional.pad(previous_slot[:, :-1], (1, 0), value=-1)
    return values_BQ.gather(1, previous_slot.clamp(min=0)), real_BQ & (previous_slot >= 0)


def document_mask(
    order: PositionOrder,
    positions_BQ: torch.Tensor,
    attention_mask: torch.Tensor | None,
    padding_BQ: torch.Tensor | None,
    backend: str,
    causal: bool,
    dtype: torch.dtype,
    num_keys: int,
    window: Window | None,
) -> Any:
    """The mask that separates the documents of a row; gaps are no boundaries.

    Args:
        order: How positions progress along the rows.
        positions_BQ: The position of each token.
        attention_mask: The mask that the model was called with, of two axes, or None.
        padding_BQ: The same as a boolean; False at padding.
        backend: The attention backend.
        causal: Whether queries see no later key.
        dtype: The dtype of an additive mask.
        num_keys: The number of keys; those after the tokens are empty slots of a static cache.
        window: The model's sliding window, if it has one.

    Returns:
        The mask that the model is to be called with. A model with windows and other layers gets one by layer type.

    Raises:
        PosEncError: If the backend is FlashAttention and cannot separate these documents.
    """
    if order is PositionOrder.CONTIGUOUS:
        return attention_mask
    if order is PositionOrder.GAPS:  # without a padding mask, transformers takes a gap for a new document
        return attention_mask if attention_mask is not None else torch.ones_like(positions_BQ)
    if is_flash_attention_requested(requested_attention_implementation=backend):
        if order is PositionOrder.PACKED and (positions_BQ.shape[0] > 1 or padding_BQ is not None):
            raise PosEncError(
                "flash attention supports packed rows (position_ids that restart) only as a single row without an "
                'attention mask: flatten the batch, or use attn_implementation="sdpa"'
            )
        return attention_mask
    real_BQ = torch.ones_like(positions_BQ, dtype=torch.bool)
    if padding_BQ is not None:  # it may cover the empty slots of a static cache
        real_BQ = padding_BQ[:, : positions_BQ.shape[1]]
    documents = document_starts(positions_BQ, real_BQ).cumsum(-1)
    if backend == "flex_attention" and window is None and not is_tracing():
        return document_block_mask(documents, real_BQ, causal, num_keys)
    visible = (documents[:, :, None] == documents[:, None, :]) & real_BQ[:, None, :]
    if causal:
        visible = visible & torch.ones(visible.shape[-2:], dtype=torch.bool, device=visible.device).tril()
    visible = torch.nn.functional.pad(visible[:, None], (0, num_keys - visible.shape[-1]))
    if backend != "sdpa":
        zero = torch.zeros((), dtype=dtype, device=visible.device)
        visible = torch.where(visible, zero, torch.finfo(dtype).min)
    return visible if window is None else by_layer_type(visible, window, causal)


def by_layer_type(mask: torch.Tensor, window: Window, causal: bool) -> AttentionMask | dict[str, AttentionMask]:
    """A mask of whole rows, (B, 1, Q, K), for a model with sliding windows: it would take the mask as it is."""
    slots = torch.arange(mask.shape[-1], device=mask.device)
    offsets = slots[: mask.shape[-2], None] - slots
    inside = offsets < window.size if causal else offsets.abs() <= window.size  # slots, as stock masks count
    windowed = mask & inside if mask.dtype == torch.bool else mask.masked_fill(~inside, torch.finfo(mask.dtype).min)
    return {"full_attention": mask, "sliding_attention": windowed} if window.has_full_layers else windowed
