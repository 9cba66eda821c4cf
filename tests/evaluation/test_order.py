"""Sensitivity to token order."""

from __future__ import annotations

import pytest
import torch

from hf_posenc.evaluation.metrics import block_ends, evaluate_order, shuffle_positions
from hf_posenc.evaluation.results import EvaluationStopped
from tests.support import tiny_models as tiny
from tests.support.evaluation import evaluated_model, make_tokenizer, random_ids


def test_shuffled_positions_stay_in_their_block() -> None:
    text_mask = torch.ones(23, dtype=torch.bool)
    text_mask[[0, 22]] = False
    fixed = torch.zeros(23, dtype=torch.bool)
    fixed[[5, 6, 13]] = True
    order = shuffle_positions(text_mask, fixed, 7, "seed")
    assert sorted(order.tolist()) == list(range(23))
    assert order[[0, 5, 6, 13, 22]].tolist() == [0, 5, 6, 13, 22]
    for start in (1, 8, 15):
        assert sorted(order[start : start + 7].tolist()) == list(range(start, start + 7))
    assert (order != torch.arange(23)).sum() > 8
    assert block_ends(text_mask, 7).nonzero()[:, 0].tolist() == [7, 14, 21]
    assert block_ends(text_mask, 21).nonzero()[:, 0].tolist() == [21]


def test_an_encoder_without_positions_ignores_order() -> None:
    """Its predictions differ only by the rounding of sums in another order; with positions they do differ."""
    tokenizer, token_ids = make_tokenizer(), random_ids(400)
    without, with_positions = (
        evaluate_order(
            evaluated_model(tiny.model("bert", scheme), token_ids, tokenizer, causal=False, shuffle_blocks=(4, None)),
            40,
        )
        for scheme in ("none", None)
    )
    for shuffle in without.shuffles:
        assert shuffle.loss_increase.value == pytest.approx(0, abs=1e-5)
        assert shuffle.loss.value > 1
    for shuffle in with_positions.shuffles:
        assert abs(shuffle.loss_increase.value) > 1e-3


def test_shuffling_a_causal_model_matches_a_plain_loop() -> None:
    model, token_ids = tiny.model("gpt2"), random_ids(100)
    result = evaluate_order(evaluated_model(model, token_ids, shuffle_blocks=(5, None), batch_tokens=50), 24)
    text_mask = torch.ones(24, dtype=torch.bool)
    for shuffle in result.shuffles:
        size = 24 if shuffle.block_size is None else 6
        ordered_loss = shuffled_loss = num_tokens = 0.0
        for index in range(4):
            window = token_ids[24 * index :][:24]
            order = shuffle_positions(text_mask, block_ends(text_mask, size), size, f"0 {shuffle.block_size} {index}")
            shuffled = window[order]
            for end in range(size - 1, 24, size):
                block = slice(end - size + 1, end)
                assert set(shuffled[block].tolist()) == set(window[block].tolist())
                with torch.no_grad():
                    ordered_loss -= model(window[None]).logits[0, end - 1].log_softmax(-1)[window[end]].item()
                    shuffled_loss -= model(shuffled[None]).logits[0, end - 1].log_softmax(-1)[window[end]].item()
                num_tokens += 1
        increase = (shuffled_loss - ordered_loss) / num_tokens
        assert shuffle.num_tokens == num_tokens
        assert shuffle.loss.value == pytest.approx(ordered_loss / num_tokens, rel=1e-5)
        assert shuffle.loss_increase.value == pytest.approx(increase, rel=1e-3, abs=1e-6)
        assert abs(shuffle.loss_increase.value) > 1e-3


def test_windows_too_short_to_shuffle_stop() -> None:
    with pytest.raises(EvaluationStopped, match="too short"):
        evaluate_order(evaluated_model(tiny.model("gpt2"), random_ids(50)), 2)
