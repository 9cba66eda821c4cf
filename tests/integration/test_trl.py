"""TRL: trainers that load a variant by its directory, or its tokenizer and reference model by the config's name."""

from __future__ import annotations

import copy
import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_posenc
from hf_posenc.errors import PosEncError
from tests.support import tiny_models as tiny
from tests.support.word_level_tokenizer import saved

needs_trl = pytest.mark.skipif(
    importlib.util.find_spec("trl") is None, reason="TRL is not installed: it is in the extra examples"
)
TEXTS = Dataset.from_dict({"text": ["w5 w6 w7 w8 w9", "w9 w8 w7"]})
PAIRS = Dataset.from_dict({"prompt": ["w5 w6"], "chosen": [" w7"], "rejected": [" w8"]})


@pytest.fixture
def stock(tmp_path: Path) -> Path:
    return saved("gpt2", tmp_path / "stock")


def arguments(kind: Any, tmp_path: Path, **options: Any) -> Any:
    common = {"report_to": "none", "use_cpu": True, "max_steps": 1, "disable_tqdm": True, "bf16": False}
    return kind(str(tmp_path / "out"), **common, **options)


@pytest.mark.slow
@needs_trl
def test_sft_of_a_directory(stock: Path, tmp_path: Path) -> None:
    from trl import SFTConfig, SFTTrainer

    hf_posenc.convert_checkpoint(stock, "alibi", tmp_path / "variant")
    options = arguments(SFTConfig, tmp_path, max_length=8)
    trainer = SFTTrainer(model=str(tmp_path / "variant"), args=options, train_dataset=TEXTS)
    assert type(trainer.model).__name__ == "PosEncGPT2LMHeadModel"
    assert trainer.train().training_loss > 0


@pytest.mark.slow
@needs_trl
def test_sft_finds_the_tokenizer_of_the_stock_checkpoint(stock: Path, tmp_path: Path) -> None:
    from trl import SFTConfig, SFTTrainer

    model = AutoModelForCausalLM.from_pretrained(stock, position_scheme="alibi")
    trainer = SFTTrainer(model=model, args=arguments(SFTConfig, tmp_path, max_length=8), train_dataset=TEXTS)
    assert trainer.processing_class("w5 w6")["input_ids"] == AutoTokenizer.from_pretrained(stock)("w5 w6")["input_ids"]
    assert trainer.train().training_loss > 0


@pytest.mark.slow
@needs_trl
def test_dpo_does_not_take_the_stock_model_as_its_reference(stock: Path, tmp_path: Path) -> None:
    from trl import DPOConfig, DPOTrainer

    model = AutoModelForCausalLM.from_pretrained(stock, position_scheme="alibi")
    options = arguments(DPOConfig, tmp_path)
    with pytest.raises(PosEncError, match=r"copy\.deepcopy\(model\) as the reference model"):
        DPOTrainer(model=model, args=options, train_dataset=PAIRS)
    trainer = DPOTrainer(model=model, ref_model=copy.deepcopy(model), args=options, train_dataset=PAIRS)
    assert type(trainer.ref_model).__name__ == "PosEncGPT2LMHeadModel"


@pytest.mark.parametrize("live", [False, True], ids=["loaded", "retrofitted"])
def test_the_config_names_the_stock_checkpoint_for_tokenizers_only(stock: Path, live: bool) -> None:
    if live:
        model = hf_posenc.retrofit(AutoModelForCausalLM.from_pretrained(stock), "alibi")
    else:
        model = AutoModelForCausalLM.from_pretrained(stock, position_scheme="alibi")
    name = model.config._name_or_path
    assert name == str(stock)
    assert model.name_or_path == ""
    assert AutoTokenizer.from_pretrained(name)("w5")["input_ids"]
    for config in (model.config, copy.deepcopy(model.config)):
        for model_class in (AutoModelForCausalLM, type(model).stock_class):
            with pytest.raises(PosEncError, match="is the stock checkpoint that a model with a position scheme"):
                model_class.from_pretrained(config._name_or_path)
    again = AutoModelForCausalLM.from_pretrained(name, position_scheme="alibi")
    assert torch.equal(again(tiny.tokens()).logits, model.eval()(tiny.tokens()).logits)
    assert type(AutoModelForCausalLM.from_pretrained(str(stock))).__name__ == "GPT2LMHeadModel"
    if live:
        restored = hf_posenc.restore(model)
        assert AutoModelForCausalLM.from_pretrained(restored.config._name_or_path).name_or_path == str(stock)
