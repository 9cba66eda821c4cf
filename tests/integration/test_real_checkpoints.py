"""The same promises on weights that were trained by others. Skipped where those checkpoints are not at hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_posenc
from benchmarks.recovery.subjects import Absent, directory_of


def checkpoint(name: str) -> Path:
    try:
        return directory_of("checkpoints", name)
    except Absent as reason:
        pytest.skip(str(reason))


@pytest.fixture
def story() -> tuple[Any, torch.Tensor]:
    directory = checkpoint("stories260k")
    text = (
        "Once upon a time, there was a little girl named Lily. She loved to play outside in the park with her friends."
    )
    return directory, AutoTokenizer.from_pretrained(directory)(text, return_tensors="pt")["input_ids"]


def perplexity(model: Any, ids: torch.Tensor) -> float:
    with torch.no_grad():
        return model(ids, labels=ids).loss.exp().item()


def test_rope_is_the_story_model_itself_and_others_are_not(story: tuple[Any, torch.Tensor]) -> None:
    directory, ids = story
    stock = AutoModelForCausalLM.from_pretrained(directory)
    own = AutoModelForCausalLM.from_pretrained(directory, position_scheme="rope")
    with torch.no_grad():
        assert torch.equal(own(ids).logits, stock(ids).logits)
    settings = {"max_new_tokens": 40, "do_sample": False}
    assert torch.equal(own.generate(ids[:, :12], **settings), stock.generate(ids[:, :12], **settings))
    known = perplexity(stock, ids)
    for scheme in ("alibi", "none", "sinusoidal"):  # what the weights were not trained with costs them dearly
        changed = AutoModelForCausalLM.from_pretrained(directory, position_scheme=scheme)
        assert perplexity(changed, ids) > 2 * known
    hf_posenc.retrofit(stock, "alibi")
    assert perplexity(hf_posenc.restore(stock), ids) == known


def test_interleaved_weights_are_not_halves(story: tuple[Any, torch.Tensor]) -> None:
    directory, ids = story
    model = AutoModelForCausalLM.from_pretrained(directory, position_scheme={"type": "rope", "layout": "interleaved"})
    assert perplexity(model, ids) > 2 * perplexity(AutoModelForCausalLM.from_pretrained(directory), ids)


def test_learned_is_the_sorting_model_itself() -> None:
    directory = checkpoint("gpt-nano-sort")
    stock = AutoModelForCausalLM.from_pretrained(directory)
    own = AutoModelForCausalLM.from_pretrained(directory, position_scheme="learned")
    ids = torch.tensor([[2, 0, 1, 1, 0, 2]])
    settings = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    with torch.no_grad():
        assert torch.equal(own(ids).logits, stock(ids).logits)
    assert torch.equal(own.generate(ids, **settings), stock.generate(ids, **settings))
    rows = stock.config.n_positions
    with pytest.raises(ValueError, match=f"serves {rows} positions"):
        own(torch.zeros(1, rows + 1, dtype=torch.long))
    assert (
        AutoModelForCausalLM.from_pretrained(directory, position_scheme="t5")(
            torch.zeros(1, 5 * rows, dtype=torch.long)
        )
        .logits.isfinite()
        .all()
    )
