"""`position_scheme` through the options of other libraries, which may have read the config before."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, GPT2LMHeadModel, pipeline

import hf_posenc
from tests.support import tiny_models as tiny
from tests.support.word_level_tokenizer import saved


@pytest.fixture
def stock(tmp_path: Path) -> Path:
    return saved("gpt2", tmp_path / "stock")


def expected_logits(stock: Path, scheme: Any) -> torch.Tensor:
    model = hf_posenc.retrofit(AutoModelForCausalLM.from_pretrained(stock), scheme)
    return logits(model)


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(tiny.tokens()).logits


@pytest.mark.parametrize("model_class", [AutoModelForCausalLM, GPT2LMHeadModel], ids=["auto", "stock class"])
def test_next_to_a_config_that_was_read_before(model_class: Any, stock: Path) -> None:
    config = AutoConfig.from_pretrained(stock)
    model = model_class.from_pretrained(stock, config=config, position_scheme="alibi")
    assert type(model).__name__ == "PosEncGPT2LMHeadModel"
    assert torch.equal(logits(model), expected_logits(stock, "alibi"))
    assert not torch.equal(logits(model), logits(AutoModelForCausalLM.from_pretrained(stock)))
    assert config.position_scheme is None, "the caller's config is not changed"
    plain = model_class.from_pretrained(stock, config=config, position_scheme=None)
    assert type(plain) is GPT2LMHeadModel


def test_an_unknown_scheme_is_named_there_too(stock: Path) -> None:
    with pytest.raises(hf_posenc.PosEncError, match="unknown type 'alibbi'"):
        GPT2LMHeadModel.from_pretrained(stock, config=AutoConfig.from_pretrained(stock), position_scheme="alibbi")


def test_pipelines_pass_it_on(stock: Path) -> None:
    run = pipeline("text-generation", model=str(stock), model_kwargs={"position_scheme": "alibi"}, device="cpu")
    assert run.model.config.position_scheme == "alibi"
    assert torch.equal(logits(run.model), expected_logits(stock, "alibi"))
    assert run("w5 w6", max_new_tokens=2, do_sample=False)


@pytest.mark.slow
def test_lm_eval_passes_it_on(stock: Path) -> None:
    pytest.importorskip("lm_eval", reason="lm-evaluation-harness is not installed: it is in the extra harness")
    from lm_eval.models.huggingface import HFLM

    harness = HFLM.create_from_arg_string(
        f"pretrained={stock},position_scheme=alibi,max_length=96,dtype=float32,device=cpu"
    )
    assert harness.model.config.position_scheme == "alibi"
    assert torch.equal(logits(harness.model), expected_logits(stock, "alibi"))
