"""Continuing from a KV cache: what is recorded on it, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import DynamicCache, StaticCache

from hf_posenc.attention.cache import CacheRecord, cache_record, check_continues, static_cache_length
from hf_posenc.attention.masks import PositionOrder
from hf_posenc.errors import PosEncError
from tests.support import tiny_models as tiny
from tests.support.cases import DECODERS

CONTEXT = {"type": "sinusoidal", "mix": "attention", "query": "context"}
SHAW = {"type": "shaw", "max_distance": 4}
PACKED = torch.tensor([[0, 1, 2, 3, 0, 1], [0, 1, 2, 3, 4, 5]])
GAPS = torch.tensor([[0, 1, 2, 3, 9, 10], [0, 1, 2, 3, 4, 5]])


@torch.no_grad()
def logits(model: Any, ids: torch.Tensor, **inputs: Any) -> torch.Tensor:
    return model(ids, **inputs).logits


@pytest.mark.parametrize("architecture", DECODERS)
@pytest.mark.parametrize("cache_class", [DynamicCache, StaticCache])
@pytest.mark.parametrize("scheme", [CONTEXT, "t5"], ids=["context", "t5"])
def test_use_cache_false_still_fills_a_passed_cache(architecture: str, cache_class: Any, scheme: Any) -> None:
    model, ids = tiny.model(architecture, scheme), tiny.tokens(2, 12)
    size = {"max_cache_len": 14} if cache_class is StaticCache else {}
    cache = cache_class(config=model.config, **size)
    steps = [
        logits(model, ids[:, start:stop], past_key_values=cache, use_cache=use_cache)
        for start, stop, use_cache in ((0, 4, True), (4, 8, False), (8, 12, True))
    ]
    expected = logits(model, ids, use_cache=False)
    torch.testing.assert_close(torch.cat(steps, 1), expected, **tiny.tolerances(architecture))


@pytest.mark.parametrize("scheme", ["alibi", SHAW, "tupe"], ids=["alibi", "shaw", "tupe"])
def test_cache_rows_can_be_reordered(scheme: Any) -> None:
    model, ids = tiny.model("gpt2", scheme), tiny.tokens(2, 10)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    positions, cache = (mask.cumsum(-1) - 1).clamp(min=0), DynamicCache(config=model.config)
    prefill = {"attention_mask": mask[:, :6], "position_ids": positions[:, :6], "past_key_values": cache}
    logits(model, ids[:, :6], **prefill)
    cache.reorder_cache(torch.tensor([1, 0]))
    ids, mask, positions = ids.flip(0), mask.flip(0), positions.flip(0)
    rest = {"attention_mask": mask, "position_ids": positions[:, 6:], "past_key_values": cache}
    continued = logits(model, ids[:, 6:], **rest)
    expected = logits(model, ids, attention_mask=mask, position_ids=positions, use_cache=False)
    torch.testing.assert_close(continued, expected[:, 6:], rtol=0, atol=1e-10)
    with pytest.raises(PosEncError, match="position_ids.*cached"):  # control: a jump is still seen
        model(
            ids[:, 9:],
            attention_mask=torch.nn.functional.pad(mask, (0, 1), value=1),
            position_ids=positions[:, 9:] + 4,
            past_key_values=cache,
        )


@pytest.mark.parametrize(("positions", "order"), [(PACKED, PositionOrder.PACKED), (GAPS, PositionOrder.GAPS)])
def test_packed_rows_and_gaps_cannot_be_continued(positions: torch.Tensor, order: PositionOrder) -> None:
    model, ids, cache = tiny.model("gpt2", "alibi"), tiny.tokens(2, 6), DynamicCache()
    logits(model, ids, position_ids=positions, past_key_values=cache)
    assert cache_record(cache).order is order
    with pytest.raises(PosEncError, match="position_ids.*use_cache=False"):
        model(ids[:, :1], past_key_values=cache)


def test_cache_filled_elsewhere_has_no_embeddings() -> None:
    ids, cache = tiny.tokens(2, 6), DynamicCache()
    logits(tiny.model("gpt2", "rope"), ids, past_key_values=cache)
    with pytest.raises(PosEncError, match="context.*cache"):
        tiny.model("gpt2", CONTEXT)(ids[:, :1], past_key_values=cache)


def test_records() -> None:
    assert cache_record(None) == cache_record(DynamicCache()) == CacheRecord()
    assert static_cache_length(DynamicCache()) is None
    assert static_cache_length(StaticCache(config=tiny.config("gpt2"), max_cache_len=7)) == 7


@pytest.mark.parametrize(
    ("positions", "visible", "continues"),
    [
        ([[0, 1, 2, 3]], None, True),
        ([[0, 1, 3, 4]], None, False),
        ([[0, 1, 0, 2]], [[1, 1, 0, 1]], True),
        ([[0, 1, 0, 3]], [[1, 1, 0, 1]], False),
        ([[0, 1, 5, 6], [3, 4, 2, 3]], None, True),
        ([[0, 0, 5, 6]], [[0, 0, 1, 1]], True),
    ],
    ids=["contiguous", "jump", "padding", "jump after padding", "reordered rows", "all padding"],
)
def test_check_continues(positions: Any, visible: Any, continues: bool) -> None:
    visible_BK = None if visible is None else torch.tensor(visible).bool()
    if continues:
        check_continues(torch.tensor(positions), visible_BK, 2)
    else:
        with pytest.raises(PosEncError):
            check_continues(torch.tensor(positions), visible_BK, 2)
