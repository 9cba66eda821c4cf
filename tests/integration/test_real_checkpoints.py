"""Published checkpoints keep their behavior. Skipped where they are not available."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_posenc
from benchmarks.recovery.tasks import CheckpointMissing, data_path
from hf_posenc.errors import PosEncError


def checkpoint(name: str) -> Path:
    try:
        return data_path("checkpoints", name)
    except CheckpointMissing as reason:
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


def test_rope_equals_the_stock_llama_and_other_schemes_do_not(story: tuple[Any, torch.Tensor]) -> None:
    directory, ids = story
    stock = AutoModelForCausalLM.from_pretrained(directory)
    variant = AutoModelForCausalLM.from_pretrained(directory, position_scheme="rope")
    with torch.no_grad():
        assert torch.equal(variant(ids).logits, stock(ids).logits)
    settings = {"max_new_tokens": 40, "do_sample": False}
    assert torch.equal(variant.generate(ids[:, :12], **settings), stock.generate(ids[:, :12], **settings))
    expected = perplexity(stock, ids)
    for scheme in ("alibi", "none", "sinusoidal"):  # the weights were not trained with these
        changed = AutoModelForCausalLM.from_pretrained(directory, position_scheme=scheme)
        assert perplexity(changed, ids) > 2 * expected
    hf_posenc.retrofit(stock, "alibi")
    assert perplexity(hf_posenc.restore(stock), ids) == expected


def test_the_rope_layout_matters(story: tuple[Any, torch.Tensor]) -> None:
    directory, ids = story
    model = AutoModelForCausalLM.from_pretrained(directory, position_scheme={"type": "rope", "layout": "interleaved"})
    assert perplexity(model, ids) > 2 * perplexity(AutoModelForCausalLM.from_pretrained(directory), ids)


def test_learned_equals_the_stock_gpt2() -> None:
    directory = checkpoint("gpt-nano-sort")
    stock = AutoModelForCausalLM.from_pretrained(directory)
    variant = AutoModelForCausalLM.from_pretrained(directory, position_scheme="learned")
    ids = torch.tensor([[2, 0, 1, 1, 0, 2]])
    settings = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    with torch.no_grad():
        assert torch.equal(variant(ids).logits, stock(ids).logits)
    assert torch.equal(variant.generate(ids, **settings), stock.generate(ids, **settings))
    rows = stock.config.n_positions
    with pytest.raises(PosEncError, match=str(rows)):
        variant(torch.zeros(1, rows + 1, dtype=torch.long))
    unlimited = AutoModelForCausalLM.from_pretrained(directory, position_scheme="t5")
    assert unlimited(torch.zeros(1, 5 * rows, dtype=torch.long)).logits.isfinite().all()
