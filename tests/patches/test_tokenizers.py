"""A variant gets the tokenizer that transformers chooses for its stock model type."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast, Qwen2Config
from transformers.models.auto import tokenization_auto

from hf_posenc.model_types import MODEL_TYPES
from hf_posenc.patches import with_scheme

TEXT = "Positions matter, 12 times over; tokens too."
misnamed = getattr(tokenization_auto, "MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS", set())


@pytest.fixture
def checkpoints(tmp_path: Path) -> tuple[Path, Path]:
    """A Qwen2 checkpoint and its variant, whose files name LLaMA's tokenizer, as some on the Hub do."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator([TEXT] * 3, trainers.BpeTrainer(vocab_size=320, initial_alphabet=alphabet))
    config = Qwen2Config(vocab_size=320, hidden_size=16, num_hidden_layers=1, num_attention_heads=2)
    stock, variant = tmp_path / "stock", tmp_path / "variant"
    config.save_pretrained(stock)
    with_scheme(config, "alibi").save_pretrained(variant)
    for directory in (stock, variant):
        PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(directory)
        path = directory / "tokenizer_config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "tokenizer_class": "LlamaTokenizerFast"}))
    return stock, variant


@pytest.mark.skipif("qwen2" not in misnamed, reason="this release of transformers uses the class that the files name")
def test_a_wrong_class_is_ignored_as_for_the_stock_model(
    checkpoints: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    stock, variant = (AutoTokenizer.from_pretrained(directory) for directory in checkpoints)
    assert type(variant) is type(stock)
    assert variant(TEXT)["input_ids"] == stock(TEXT)["input_ids"]
    monkeypatch.setattr(
        tokenization_auto, "MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS", misnamed - {"posenc_qwen2"}
    )  # the control: without the entry, the tokens differ
    assert AutoTokenizer.from_pretrained(checkpoints[1])(TEXT)["input_ids"] != stock(TEXT)["input_ids"]


def test_only_variants_of_such_types_are_added() -> None:
    added = {name.removeprefix("posenc_") for name in misnamed if name.startswith("posenc_")}
    assert added == {model_type for model_type in misnamed if model_type in MODEL_TYPES}
