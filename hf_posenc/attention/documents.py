"""Rows that hold several documents: found by positions that begin anew, and shut off from each other."""

from __future__ import annotations

import enum
from typing import Any

import torch
from transformers.utils.generic import is_flash_attention_requested

from ..schemes.inputs import is_tracing


class PositionOrder(enum.Enum):
    """How the positions of the real tokens run along the rows."""

    STEADY = "each is one above the one before"
    GAPS = "they rise, by more than one somewhere"
    RESTARTS = "they begin anew: rows hold several documents"
    UNKNOWN = "not known while the forward is traced"


def classify_positions(
    queries: torch.Tensor, slots: torch.Tensor, real: torch.Tensor | None
) -> tuple[PositionOrder, bool]:
    """How explicit positions run, and whether they run along with the slots. Reads three flags off the device."""
    if queries.shape[-1] == 1:
        return PositionOrder.STEADY, True
    if is_tracing():
        return PositionOrder.UNKNOWN, False
    if real is None:
        real = torch.ones_like(queries, dtype=torch.bool)
    queries, real = torch.broadcast_tensors(queries, real)  # a mask, or positions, may be one for all rows

    def constant(shift: torch.Tensor) -> torch.Tensor:
        low = shift.masked_fill(~real, torch.iinfo(shift.dtype).max).amin(-1)
        high = shift.masked_fill(~real, torch.iinfo(shift.dtype).min).amax(-1)
        return ((low >= high) | ~real.any(-1)).all()

    flags = torch.stack(
        [constant(queries - slots), constant(queries - real.cumsum(-1)), ~document_starts(queries, real).any()]
    )
    by_slot, by_count, one_document = flags.tolist()
    order = PositionOrder.STEADY if by_count else PositionOrder.GAPS if one_document else PositionOrder.RESTARTS
    return order, by_slot


def document_starts(queries: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
    """True at each real token whose position is below that of the real token before it, or zero a second time."""
    slots = torch.arange(queries.shape[-1], device=queries.device).expand_as(queries)
    last_real = torch.where(real, slots, -1).cummax(-1).values
    last_real = torch.nn.functional.pad(last_real[:, :-1], (1, 0), value=-1)
    before = queries.gather(1, last_real.clamp(min=0))
    falls = (queries < before) | ((queries == 0) & (before == 0))
    return falls & real & (last_real >= 0)


def mask_documents(
    order: PositionOrder, queries: torch.Tensor, mask: Any, padding: Any, config: Any, causal: bool, dtype: torch.dtype
) -> Any:
    """The mask with which no token sees another document of its row, and gaps are not taken for documents."""
    implementation = config._attn_implementation
    if order is PositionOrder.STEADY:
        return mask
    if order is PositionOrder.GAPS:  # transformers takes a gap for a new document unless there is a padding mask
        return mask if mask is not None else torch.ones_like(queries)
    if is_flash_attention_requested(requested_attention_implementation=implementation):
        if order is PositionOrder.RESTARTS and (queries.shape[0] > 1 or padding is not None):
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
