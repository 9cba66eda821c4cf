"""Masks of all forms, padding, and packed rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hf_posenc.attention.masks import PositionOrder, apply_mask, classify_positions, document_starts, visible_pairs
from tests.support import tiny_models as tiny

CONTEXT = {"type": "sinusoidal", "mix": "attention", "query": "context"}
COPE = {"type": "cope", "max_positions": 6}
SHAW = {"type": "shaw", "max_distance": 4}


@torch.no_grad()
def logits(model: Any, ids: torch.Tensor, **inputs: Any) -> torch.Tensor:
    return model(ids, **inputs).logits


@pytest.mark.parametrize(
    ("positions", "real", "order", "matches_slots"),
    [
        ([[0, 1, 2, 3]], None, PositionOrder.CONTIGUOUS, True),
        ([[5, 6, 7, 8]], None, PositionOrder.CONTIGUOUS, True),
        ([[0, 0, 0, 1]], [[0, 0, 1, 1]], PositionOrder.CONTIGUOUS, True),
        ([[0, 1, 0, 2]], [[1, 1, 0, 1]], PositionOrder.CONTIGUOUS, False),
        ([[0, 1, 4, 5]], None, PositionOrder.GAPS, False),
        ([[0, 1, 0, 1]], None, PositionOrder.PACKED, True),
        ([[0, 0, 0, 0]], None, PositionOrder.PACKED, True),
        ([[0, 1, 2, 3], [4, 5, 2, 3]], None, PositionOrder.PACKED, True),
        ([[0, 1, 0, 2]], None, PositionOrder.PACKED, False),
        ([[0, 0, 1, 7]], [[1, 1, 1, 0]], PositionOrder.PACKED, True),
        ([[0, 5, 0, 2]], [[1, 0, 1, 1]], PositionOrder.PACKED, False),
        ([[0, 0, 5, 2]], [[1, 1, 0, 1]], PositionOrder.PACKED, True),
        ([[0, 0, 5, 1]], [[1, 1, 0, 1]], PositionOrder.PACKED, False),
        ([[0, 1, 2, 3], [0, 1, 1, 2]], None, PositionOrder.GAPS, False),
    ],
)
def test_classify_positions(positions: Any, real: Any, order: PositionOrder, matches_slots: bool) -> None:
    real_BQ = None if real is None else torch.tensor(real).bool()
    slots = torch.arange(4)[None]
    assert classify_positions(torch.tensor(positions), slots, real_BQ) == (order, matches_slots)


def test_document_starts_ignore_padding() -> None:
    positions = torch.tensor([[0, 1, 0, 1, 0, 0, 1]])
    real = torch.tensor([[1, 1, 1, 1, 0, 1, 1]]).bool()
    assert document_starts(positions, real).int().tolist() == [[0, 0, 1, 0, 0, 1, 0]]


@pytest.mark.parametrize("backend", ["sdpa", "eager", pytest.param("flex_attention", marks=pytest.mark.slow)])
@pytest.mark.parametrize(("architecture", "scheme"), [("bert", "t5"), ("gpt2", "deberta"), ("llama", "rope")])
def test_packed_documents_equal_separate_ones(architecture: str, scheme: str, backend: str) -> None:
    model, ids = tiny.model(architecture, scheme, torch.float32), tiny.tokens(1, 12)
    model.set_attn_implementation(backend)
    packed = logits(model, ids, position_ids=torch.tensor([[*range(5), *range(7)]]), use_cache=False)
    separate = torch.cat([logits(model, ids[:, :5]), logits(model, ids[:, 5:])], 1)
    torch.testing.assert_close(packed, separate, rtol=0, atol=2e-5)
    assert (logits(model, ids, use_cache=False) - separate)[:, 5:].abs().max() > 1e-3  # control: one document


@pytest.mark.parametrize(
    "scheme", [{"type": "cope", "max_positions": 6}, CONTEXT, SHAW, "forget"], ids=["cope", "context", "shaw", "forget"]
)
@pytest.mark.parametrize("lowest", [-1e4, -1e9, float("-inf"), torch.finfo(torch.float64).min])
def test_additive_masks_hide_with_any_low_number(scheme: Any, lowest: float) -> None:
    model, ids = tiny.model("gpt2", scheme), tiny.tokens(2, 10)
    model.set_attn_implementation("eager")
    mask = torch.zeros(10, 10, dtype=torch.float64).masked_fill(~torch.ones(10, 10).tril().bool(), lowest)
    masked = logits(model, ids, attention_mask=mask.expand(2, 1, -1, -1), use_cache=False)
    torch.testing.assert_close(masked, logits(model, ids, use_cache=False), rtol=0, atol=1e-10)


@pytest.mark.parametrize("scheme", ["alibi", "learned"])
def test_one_mask_row_with_positions_of_each_row(scheme: str) -> None:
    model, ids = tiny.model("gpt2", scheme), tiny.tokens(2, 6)
    mask = tiny.additive_mask(torch.ones(6, 6, dtype=torch.bool).tril())[None, None]
    masked = logits(model, ids, position_ids=torch.arange(6).expand(2, -1), attention_mask=mask)
    torch.testing.assert_close(masked, logits(model, ids))


def test_float16_with_padding_and_large_logits_stays_finite() -> None:
    """The lowest float16 plus a negative logit is -inf: a row of padding would become NaN, and so what reads it."""
    model = tiny.model("gpt2", SHAW, torch.float32)
    with torch.no_grad():
        for block in model.transformer.h:
            block.attn.c_attn.weight[:, : 2 * tiny.WIDTH] *= 20
    ids, mask = tiny.tokens(2, 10), torch.ones(2, 10, dtype=torch.long)
    mask[1, :4] = 0
    assert logits(model.to(torch.float16), ids, attention_mask=mask)[:, 4:].isfinite().all()


def test_apply_mask_stays_finite() -> None:
    bias = torch.full((1, 1, 2, 2), -100.0, dtype=torch.float16)
    lowest = torch.finfo(torch.float16).min
    visible = torch.tensor([[True, False], [True, True]])
    expected = torch.tensor([[-100.0, lowest], [-100.0, -100.0]], dtype=torch.float16)[None, None]
    for mask, causal in ((None, True), (visible, False), (tiny.additive_mask(visible, torch.float16), False)):
        assert torch.equal(apply_mask(bias, mask, causal), expected)
    assert apply_mask(bias, None, False) is bias


def test_visible_pairs_of_all_forms() -> None:
    from torch.nn.attention.flex_attention import create_block_mask

    query, causal = torch.zeros(2, 4, 3, 8), torch.ones(3, 3, dtype=torch.bool).tril()
    block_mask = create_block_mask(lambda b, h, q, k: q >= k, 2, None, 3, 3, device="cpu")
    for mask in (None, causal[None, None], tiny.additive_mask(causal)[None, None], block_mask):
        assert torch.equal(visible_pairs(mask, mask is None, query, 3).expand(2, 1, 3, 3), causal.expand(2, 1, 3, 3))
