"""Rows longer than a teacher can read are read in overlapping windows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModel

from hf_posenc.checkpoints import RECOVERY_FILE
from hf_posenc.training import Teacher, train
from hf_posenc.training.teacher import SpecialTokens, Window, plan_windows, window_inputs
from tests.support import tiny_models as tiny
from tests.support import word_level_tokenizer as word_level
from tests.support.sampling import some
from tests.support.training_runs import losses_in, request, settings

LENGTH = tiny.TRAINED_LENGTH


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("num_tokens", "size"), [(5, 8), (8, 8), (9, 8), (16, 8), (21, 8), (100, 16), (31, 5)])
def test_every_token_is_kept_once_with_enough_context(num_tokens: int, size: int, causal: bool) -> None:
    windows = plan_windows(num_tokens, size, causal)
    kept = [token for window in windows for token in range(window.keep_from, window.keep_to)]
    assert kept == list(range(num_tokens))
    for window in windows:
        assert window.start <= window.keep_from < window.keep_to <= window.stop <= min(window.start + size, num_tokens)
        before, after = window.keep_from - window.start, window.stop - window.keep_to
        if window.start:
            assert before >= (size // 2 if causal else size // 4)
        if window.stop < num_tokens and not causal:
            assert after >= size // 4
    assert len(windows) == 1 or num_tokens > size


def test_inputs_of_a_window() -> None:
    ids = torch.arange(10, 22)[None].repeat(2, 1)
    mask = torch.ones_like(ids)
    mask[1, 3:] = 0
    positions = torch.tensor([[*range(7), *range(5)]]).repeat(2, 1)
    inputs = {"input_ids": ids, "attention_mask": mask, "position_ids": positions}
    selected = window_inputs(inputs, Window(4, 10, 5, 9), SpecialTokens(first=1, last=2))
    assert selected["input_ids"][0].tolist() == [1, 15, 16, 17, 18, 2]
    assert selected["position_ids"][0].tolist() == [0, 1, 2, 0, 1, 2], "the cut document begins anew"
    assert selected["attention_mask"].tolist() == [[1] * 6, [1] * 6], "a window of padding has something to see"
    offset = window_inputs({"input_ids": ids, "position_ids": positions + 2}, Window(4, 10, 4, 10), SpecialTokens(), 2)
    assert offset["position_ids"][0].tolist() == [2, 3, 4, 2, 3, 4]
    assert offset["input_ids"][0].tolist() == ids[0, 4:10].tolist()
    assert ids[0].tolist() == list(range(10, 22)), "the batch itself is left alone"
    assert positions[0].tolist() == [*range(7), *range(5)]


@pytest.mark.parametrize("lean", [True, False])
def test_causal_teacher_reads_long_rows(lean: bool) -> None:
    ids = tiny.tokens(2, 2 * LENGTH + 5)
    model = tiny.model("gpt2")
    output = Teacher(model).forward({"input_ids": ids}, lean=lean)
    logits = output.logits_BNV if isinstance(output.logits_BNV, torch.Tensor) else output.logits_BNV.dense()
    assert logits.shape[:2] == ids.shape
    assert {states.shape[:2] for states in output.hidden_states} == {ids.shape}
    half = LENGTH // 2
    with torch.no_grad():
        first, second = model(ids[:, :LENGTH]).logits, model(ids[:, half : half + LENGTH]).logits
    torch.testing.assert_close(logits[:, :LENGTH], first)
    torch.testing.assert_close(logits[:, LENGTH : half + LENGTH], second[:, half:])
    assert not torch.allclose(logits[:, half:LENGTH], second[:, :half]), "control: less context predicts otherwise"


def test_encoder_windows_have_special_tokens() -> None:
    ids = tiny.tokens(2, 2 * LENGTH)
    ids[:, 0], ids[:, -1] = 1, 2
    model = tiny.model("bert").base_model
    states = Teacher(model, special_tokens=SpecialTokens(1, 2)).last_hidden_state({"input_ids": ids})
    half, quarter = LENGTH // 2, LENGTH // 4
    middle = ids[:, half : half + LENGTH].clone()
    plain = model(middle).last_hidden_state
    middle[:, 0], middle[:, -1] = 1, 2
    expected = model(middle).last_hidden_state
    kept = slice(quarter, LENGTH - quarter)
    torch.testing.assert_close(states[:, half:][:, kept], expected[:, kept])
    assert not torch.allclose(expected[:, kept], plain[:, kept]), "control: the special tokens matter"


@some("packing", [True, False], fast=[True])
def test_headless_encoder_learns_longer_rows(stock: dict[str, Path], text: Path, tmp_path: Path, packing: bool) -> None:
    headless = tmp_path / "headless"
    AutoModel.from_pretrained(stock["bert"]).save_pretrained(headless)
    word_level.tokenizer(encoder=True).save_pretrained(headless)
    longer = request(headless, text, scheme="alibi", train_length=str(2 * LENGTH), eval_data=str(text), packing=packing)
    out = train(longer, settings(tmp_path / "out"))
    assert losses_in(out)[-1] < losses_in(out)[0]
    recovery = json.loads((out / RECOVERY_FILE).read_text())
    assert recovery["eval_cosine"] > recovery["swapped"]["eval_cosine"]
