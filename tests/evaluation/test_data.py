"""Special tokens and windows."""

from __future__ import annotations

import pytest
import torch
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from hf_posenc.errors import PosEncError
from hf_posenc.evaluation.data import SpecialTokens, Windows, load_token_ids
from hf_posenc.evaluation.metrics import TOKENS, PasskeyPrompt
from tests.support.evaluation import CopyModel, evaluated_model, make_tokenizer, random_ids


def test_special_tokens_are_those_the_tokenizer_adds() -> None:
    assert SpecialTokens.from_tokenizer(make_tokenizer(), causal=False) == SpecialTokens((1,), (2,))
    assert SpecialTokens.from_tokenizer(make_tokenizer(), causal=True) == SpecialTokens((1,), ())
    assert SpecialTokens.from_tokenizer(make_tokenizer(add_special_tokens=False), causal=False) == SpecialTokens()
    with pytest.raises(PosEncError, match="2 special tokens"):
        Windows(random_ids(9), SpecialTokens((1,), (2,)), 2)


def test_documents_are_joined_and_truncated() -> None:
    tokenizer = make_tokenizer()
    assert load_token_ids(["w5 w6", "w7"], tokenizer, 100).tolist() == [5, 6, 2, 7, 2]
    assert load_token_ids(["w5 w6", "w7"], tokenizer, 4).tolist() == [5, 6, 2, 7]
    assert load_token_ids(torch.tensor([[5, 6], [7, 8]]), None, 3).tolist() == [5, 6, 7]
    with pytest.raises(PosEncError, match="empty"):
        load_token_ids([], tokenizer, 4)
    with pytest.raises(PosEncError, match="tokenizer"):
        load_token_ids(["w5"], None, 4)


def test_a_tokenizer_that_drops_almost_everything() -> None:
    """It keeps only two letters, so most sample texts and the passkey question come out empty."""
    backend = Tokenizer(models.WordLevel({"A": 0, "B": 1, "[B]": 2}, unk_token="?"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("[AB]"), "removed", invert=True)
    backend.post_processor = processors.TemplateProcessing(single="[B] $A", special_tokens=[("[B]", 2)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="[B]")
    assert tokenizer("a", add_special_tokens=False)["input_ids"] == []
    assert SpecialTokens.from_tokenizer(tokenizer, causal=True) == SpecialTokens((2,), ())
    prompt = PasskeyPrompt(evaluated_model(CopyModel(), random_ids(300), tokenizer))
    assert prompt.key_type == TOKENS
    assert prompt.question == random_ids(300)[:4].tolist()
