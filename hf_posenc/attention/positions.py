"""From the inputs of a forward pass to `Positions`: padding, packing, caches and explicit position_ids.

Without position_ids, a token's position is its slot minus the padding before it. Explicit position_ids are honoured: a
position that decreases, or is zero again, starts a new document; one that increases by more than one is a gap.

Shape legend: B batch, Q queries, K keys, E hidden size.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.functional import pad
from transformers.cache_utils import Cache

from ..errors import PosEncError
from ..schemes import LayerSeams, Positions, Scheme, is_tracing
from .cache import (
    cache_lengths,
    cache_record,
    check_cache_order,
    check_continues,
    check_no_static_window,
    concat_cached_positions,
    running_mean_embeds,
)
from .key_counts import key_counts
from .masks import PositionOrder, Window, classify_positions, document_mask, visible_keys
from .token_masks import new_tokens


@dataclasses.dataclass(frozen=True)
class PositionNeeds:
    """What the schemes of a model read, beyond the positions of the queries."""

    distances: bool
    key_positions: bool
    key_counts: bool
    tokens: bool
    context: bool
    length: bool

    @classmethod
    def of(cls, schemes: Sequence[Scheme], seams: Sequence[frozenset[str]]) -> PositionNeeds:
        pairs = list(zip(schemes, seams, strict=True))
        return cls(
            distances=any(scheme.needs_distances for scheme, acts in pairs if acts & {"score", "value"}),
            key_positions=any(scheme.needs_key_positions for scheme in schemes),
            key_counts=any(scheme.needs_key_counts for scheme in schemes),
            tokens=any(scheme.acts_at("gate") for scheme in schemes),
            context=any(scheme.needs_context for scheme, acts in pairs if "embed" in acts),
            length=any(scheme.depends_on_length for scheme in schemes),
        )


@dataclasses.dataclass
class TokenLayout:
    """How the tokens of a forward pass lie in their rows and in the cache."""

    queries_BQ: torch.Tensor
    order: PositionOrder
    uniform: bool
    """Whether distances are the same slot by slot for every query and the keys that it sees."""
    separated: bool
    """Whether the mask is to be built here, so that documents that share a row are hidden from each other."""
    cache: Cache | None
    num_cached: int | torch.Tensor
    key_length: int
    is_first_call: bool
    leading_padding_B1: torch.Tensor | int
    """How much padding is before the first token of each row, if a mask of two axes says so."""
    visible_BK: torch.Tensor | None
    """Which keys are tokens, not padding; None means all."""
    visible_BQK: torch.Tensor | None
    """Which keys each query sees, if the mask says so."""
    all_positions_BK: torch.Tensor | None
    """Including those in the cache, if they are known."""


@dataclasses.dataclass
class ResolvedPositions:
    """The positions of a forward pass, the attention mask that goes with them, and what the cache must remember."""

    positions: Positions
    attention_mask: Any
    layout: TokenLayout
    context_embeds_BQE: torch.Tensor | None
    """The token embeddings, if later calls need them."""


def resolve_positions(
    inputs: dict[str, Any],
    *,
    dtype: torch.dtype,
    backend: str,
    causal: bool,
    tracing: bool,
    needs: PositionNeeds,
    schemes: Sequence[Scheme],
    active: tuple[LayerSeams, ...],
    table: nn.Module | None,
    rotary: nn.Module | None,
    rotary_positions: torch.Tensor | None,
    window: Window | None,
) -> ResolvedPositions:
    """Work out where the tokens of one forward pass stand, and mask documents that share a row from each other.

    Args:
        inputs: The inputs of the model's forward; not changed.
        dtype: The dtype of the token embeddings.
        backend: The attention backend that the model is set to.
        causal: Whether the model is causal.
        tracing: Whether this pass is being compiled or exported, so that no tensor may be read.
        needs: What the schemes read.
        schemes: The schemes of the model.
        active: For each layer and seam, the indices of the schemes that act there.
        table: The architecture's own position table, if a scheme adds it.
        rotary: The architecture's own rotary embedding, if it has one.
        rotary_positions: The positions that it reads, if they are not those of the tokens in the text.
        window: The model's sliding window, if it has one.

    Returns:
        Complete positions and the mask to use.

    Raises:
        PosEncError: If the cache, mask and position_ids do not determine the positions that the schemes need.
    """
    tokens = token_like(inputs)
    num_queries = tokens.shape[-1]
    num_rows = tokens.numel() // max(num_queries, 1)
    mask, position_ids = inputs.get("attention_mask"), inputs.get("position_ids")
    given_mask = mask
    if isinstance(mask, dict):  # generate() prepares one mask per type of layer
        inputs = {**inputs, "attention_mask": mask.get("full_attention")}
    padding_BK = mask.reshape(num_rows, -1).bool() if isinstance(mask, torch.Tensor) and mask.dim() < 4 else None
    layout = _layout(inputs, tokens, padding_BK, needs, given_mask is None or padding_BK is not None)
    key_length, keys_BK = layout.key_length, None
    if needs.key_positions or (needs.distances and layout.order is not PositionOrder.CONTIGUOUS) or not layout.uniform:
        check_no_static_window(layout.cache)
    if needs.key_positions or not layout.uniform:
        keys_BK = _key_positions(layout, by_slot=position_ids is None)
    if layout.uniform:
        last = num_queries - 1
        distances = torch.arange(num_queries + key_length - 1, device=tokens.device) - last - layout.num_cached
    else:
        assert keys_BK is not None
        distances = keys_BK[:, None, :] - layout.queries_BQ[:, :, None]
    if position_ids is not None and layout.separated:
        queries_BQ = layout.queries_BQ.expand(num_rows, -1)
        mask = document_mask(layout.order, queries_BQ, mask, padding_BK, backend, causal, dtype, key_length, window)
    context_BQE, spans, counts_BHQ, window_counts_BHQ = None, None, None, None
    if needs.key_counts:
        counts_BHQ, window_counts_BHQ = key_counts(given_mask, layout, causal, window)
    tokens_BHQ = new_tokens(given_mask, padding_BK, layout.num_cached, num_queries) if needs.tokens else None
    if needs.context:
        if given_mask is not None and not isinstance(given_mask, (torch.Tensor, dict)):
            raise PosEncError('query="context" has to read the attention mask: pass a tensor, not a BlockMask')
        context_BQE = running_mean_embeds(inputs["inputs_embeds"], layout, len(active), causal)
    may_have_spans = needs.distances and layout.is_first_call and layout.order is PositionOrder.CONTIGUOUS
    if padding_BK is not None and may_have_spans and not tracing and tokens.device.type == "cpu":
        spans = _row_spans(padding_BK[:, :num_queries])
    bounded = position_ids is None and isinstance(layout.num_cached, int)
    positions = Positions(
        layout.queries_BQ,
        distances,
        uniform=layout.uniform,
        key_length=key_length,
        length_bound=int(layout.num_cached) + num_queries if bounded else None,
        cached=not layout.is_first_call,
        num_cached=layout.num_cached,
        cache_filled_at=cache_record(layout.cache).prefill_length if needs.length else None,
        packed=layout.order in (PositionOrder.PACKED, PositionOrder.UNKNOWN),
        causal=causal,
        backend=backend,
        dtype=torch.float64 if dtype == torch.float64 else torch.float32,
        keys_BK=keys_BK,
        key_counts_BHQ=counts_BHQ,
        window_key_counts_BHQ=window_counts_BHQ,
        tokens_BHQ=tokens_BHQ,
        spans=spans,
        table=table,
        rotary=rotary,
        rotary_positions=rotary_positions,
        context_BQE=context_BQE,
        schemes=schemes,
        active=active,
    )
    return ResolvedPositions(positions, mask, layout, inputs["inputs_embeds"] if needs.context else None)


def token_like(inputs: dict[str, Any]) -> torch.Tensor:
    """A tensor with the shape of the token ids, whether ids or embeddings were passed."""
    input_ids: torch.Tensor | None = inputs.get("input_ids")
    return input_ids if input_ids is not None else inputs["inputs_embeds"][..., 0]


def _layout(
    inputs: dict[str, Any],
    tokens: torch.Tensor,
    padding_BK: torch.Tensor | None,
    needs: PositionNeeds,
    may_add_mask: bool,
) -> TokenLayout:
    num_queries, mask, position_ids = tokens.shape[-1], inputs.get("attention_mask"), inputs.get("position_ids")
    num_rows = tokens.numel() // max(num_queries, 1)
    visible_BQK = None
    if padding_BK is None and isinstance(mask, torch.Tensor):  # generate() prepares 4D masks for static caches
        visible_BQK = visible_keys(mask).any(1)
    visible_BK = padding_BK if visible_BQK is None else visible_BQK.any(1)
    cache, num_cached, key_length = cache_lengths(inputs.get("past_key_values"), num_queries)
    is_first_call = isinstance(num_cached, int) and num_cached == 0
    slots_BQ = torch.arange(num_queries, device=tokens.device)[None] + num_cached
    leading_padding_B1 = 0 if padding_BK is None else (padding_BK.cumsum(-1) == 0).sum(-1, keepdim=True)
    order, uniform, separated = PositionOrder.CONTIGUOUS, True, is_first_call and may_add_mask
    if position_ids is None:
        queries_BQ = slots_BQ if padding_BK is None else (slots_BQ - leading_padding_B1).clamp(min=0)
    else:
        queries_BQ = position_ids.reshape(-1, num_queries)
        order, uniform = classify_positions(queries_BQ, slots_BQ, _new_tokens(visible_BK, num_cached, num_queries))
        uniform = uniform and (is_first_call or _all_visible(visible_BK, num_cached, num_queries))
        if order is PositionOrder.PACKED:  # a mask of the caller may show keys of other documents
            uniform = uniform and separated
    needs_keys = needs.distances or needs.key_positions
    all_positions_BK = queries_BQ.expand(num_rows, -1) if needs_keys else None
    if not is_first_call:
        check_cache_order(cache, order, needs_keys)
        if all_positions_BK is not None:
            all_positions_BK = concat_cached_positions(cache, all_positions_BK, num_cached)
        if position_ids is not None and all_positions_BK is not None:
            check_continues(all_positions_BK, visible_BK, num_cached)
    return TokenLayout(
        queries_BQ=queries_BQ,
        order=order,
        uniform=uniform or not needs.distances,
        separated=separated,
        cache=cache,
        num_cached=num_cached,
        key_length=key_length,
        is_first_call=is_first_call,
        leading_padding_B1=leading_padding_B1,
        visible_BK=visible_BK,
        visible_BQK=visible_BQK,
        all_positions_BK=all_positions_BK,
    )


def _row_spans(padding_BK: torch.Tensor) -> tuple[tuple[int, int], ...] | None:
    """Where the tokens of each row start and end; None if there are holes between them."""
    counts = padding_BK.sum(-1).tolist()
    starts = [start if count else 0 for start, count in zip(padding_BK.int().argmax(-1).tolist(), counts, strict=True)]
    spans = tuple((start, start + count) for start, count in zip(starts, counts, strict=True))
    return spans if all(row[start:stop].all() for row, (start, stop) in zip(padding_BK, spans, strict=True)) else None


def _all_visible(visible_BK: torch.Tensor | None, num_cached: int | torch.Tensor, num_queries: int) -> bool:
    """Whether no key is hidden, so that cached keys are where their slots are."""
    if visible_BK is None:
        return True
    return isinstance(num_cached, int) and not is_tracing() and bool(visible_BK[:, : num_cached + num_queries].all())


def _new_tokens(
    values_BK: torch.Tensor | None, num_cached: int | torch.Tensor, num_queries: int
) -> torch.Tensor | None:
    """(B, Q): the columns of the new tokens."""
    if values_BK is None:
        return None
    if not isinstance(num_cached, int):
        return values_BK.index_select(1, torch.arange(num_queries, device=values_BK.device) + num_cached)
    if values_BK.shape[-1] < num_cached + num_queries:
        raise PosEncError(
            f"attention_mask covers {values_BK.shape[-1]} tokens, but there are {num_cached} cached and {num_queries} "
            "new ones: pass the mask of all of them"
        )
    return values_BK[:, num_cached : num_cached + num_queries]


def _key_positions(layout: TokenLayout, by_slot: bool) -> torch.Tensor:
    """(B, K): slots minus leading padding, or with explicit position_ids, what follows from them.

    On a first call the keys are the queries; later, a key's position is its count among the visible keys.
    """
    queries_BQ, visible_BK, key_length = layout.queries_BQ, layout.visible_BK, layout.key_length
    num_queries = queries_BQ.shape[-1]
    if by_slot:
        slots_BK = torch.arange(key_length, device=queries_BQ.device)[None]
        return (slots_BK - layout.leading_padding_B1).clamp(min=0)
    if layout.is_first_call:
        return pad(queries_BQ, (0, key_length - num_queries))
    if visible_BK is None:
        visible_BK = torch.ones(1, key_length, dtype=torch.bool, device=queries_BQ.device)
    visible_BK = pad(visible_BK[:, :key_length], (0, max(key_length - visible_BK.shape[-1], 0)))
    counts_BK = visible_BK.cumsum(-1)
    is_token_BQ = _new_tokens(visible_BK, layout.num_cached, num_queries)
    counts_BQ = _new_tokens(counts_BK, layout.num_cached, num_queries)
    assert is_token_BQ is not None
    assert counts_BQ is not None
    is_token_BQ, shifts_BQ = torch.broadcast_tensors(is_token_BQ, queries_BQ - counts_BQ)
    shift_B1: torch.Tensor = shifts_BQ.gather(1, is_token_BQ.int().argmax(-1, keepdim=True))
    return counts_BK + shift_B1
