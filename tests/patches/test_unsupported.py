"""Model types that cannot have a position scheme are refused with the reason, whichever way the scheme is given."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    BloomConfig,
    BloomForCausalLM,
    DebertaConfig,
    DebertaForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedConfig,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
)

import hf_posenc
from hf_posenc import PosEncError
from hf_posenc.patches import ARCHITECTURES, refusal_of
from tests.support import tiny_models as tiny

SIZES = {"vocab_size": 61, "hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 1, "intermediate_size": 40}
UNSUPPORTED: dict[str, tuple[Any, Callable[[], PreTrainedModel], str]] = {
    "bloom": (
        AutoModelForCausalLM,
        lambda: BloomForCausalLM(BloomConfig(vocab_size=61, hidden_size=32, n_layer=1, n_head=4)),
        "attention interface",
    ),
    "deberta": (
        AutoModelForMaskedLM,
        lambda: DebertaForMaskedLM(DebertaConfig(**SIZES)),
        "attention interface",
    ),
    "t5": (
        AutoModelForSeq2SeqLM,
        lambda: T5ForConditionalGeneration(T5Config(vocab_size=61, d_model=32, num_layers=1, num_heads=4, d_kv=8)),
        "several stacks",
    ),
}
WAYS: dict[str, Callable[[Any, PreTrainedModel, Path], object]] = {
    "auto class": lambda auto, stock, path: auto.from_pretrained(path, position_scheme="alibi"),
    "model class": lambda auto, stock, path: type(stock).from_pretrained(path, position_scheme="alibi"),
    "auto config": lambda auto, stock, path: AutoConfig.from_pretrained(path, position_scheme="alibi"),
    "config class": lambda auto, stock, path: type(stock.config)(position_scheme="alibi"),
    "config field": lambda auto, stock, path: setattr(stock.config, "position_scheme", "alibi"),
    "retrofit": lambda auto, stock, path: hf_posenc.retrofit(stock, "alibi"),
    "patched": lambda auto, stock, path: load_patched(auto, path),
    "convert": lambda auto, stock, path: hf_posenc.convert_checkpoint(path, "alibi", path.parent / "out"),
    "inspect": lambda auto, stock, path: hf_posenc.inspect_checkpoint(path),
}


def load_patched(auto: Any, path: Path) -> None:
    with hf_posenc.patched("alibi"):
        auto.from_pretrained(path)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("model_type", UNSUPPORTED)
def test_no_way_of_giving_a_scheme_is_silently_ignored(model_type: str, way: str, tmp_path: Path) -> None:
    auto, build, reason = UNSUPPORTED[model_type]
    stock = build()
    stock.save_pretrained(tmp_path / "stock")
    with pytest.raises(PosEncError, match=f"'{model_type}'.*{reason}.*docs/families.md"):
        WAYS[way](auto, stock, tmp_path / "stock")
    assert stock.config.position_scheme is None
    assert "position_scheme" not in stock.config.to_dict()
    auto.from_pretrained(tmp_path / "stock")  # control: without a scheme it loads


@pytest.mark.parametrize(
    ("model_type", "reason", "way_out"),
    [
        ("deepseek_v3", "latent", "another type"),
        ("qwen3_next", "without attention scores", "'qwen3'"),
        ("jamba", "without attention scores", "another type"),
        ("falcon_h1", "without attention scores", "another type"),
        ("mamba", "without attention scores", "another type"),
        ("lfm2", "without attention scores", "another type"),
        ("bart", "several stacks", "another type"),
        ("whisper", "several stacks", "another type"),
        ("llama4_text", "chunked_attention", "'llama'"),
        ("mpnet", "attention interface", "another type"),
        ("gptj", "attention interface", "another type"),
        ("gpt_neo", "attention interface", "'gpt_neox'"),
        ("xlnet", "attention interface", "another type"),
        ("gemma3", "text model, here of type 'gemma3_text'", "retrofit"),
        ("vit", "no language model", "another type"),
        ("no-such-type", "transformers does not have it", "hf_posenc.support(config)"),
        ("layoutlm", "no record", "hf_posenc.support('layoutlm')"),
    ],
)
def test_reasons(model_type: str, reason: str, way_out: str) -> None:
    refusal = refusal_of(model_type)
    assert reason in refusal.reason
    assert way_out in refusal.way_out


def test_no_reason_is_found_against_supported_types() -> None:
    """The control of the rules: they would accept what is known to work."""
    reasons = {
        name: refusal_of(name).reason for name in ARCHITECTURES if name in ("gpt2", "llama", "gemma3_text", "bert")
    }
    assert set(reasons.values()) == {"it has no record"}


def test_a_patched_block_that_built_a_supported_model_accepts_others() -> None:
    with hf_posenc.patched("alibi"):
        UNSUPPORTED["bloom"][1]()
        model = GPT2LMHeadModel(tiny.config("gpt2"))
    assert model.config.position_scheme == "alibi"


def test_a_config_class_may_have_a_field_of_that_name() -> None:
    class OwnConfig(PreTrainedConfig):
        model_type = "own-type"

        def __init__(self, position_scheme: str = "spiral", **kwargs: Any) -> None:
            self.position_scheme = position_scheme
            super().__init__(**kwargs)

    assert OwnConfig().position_scheme == "spiral"
    assert OwnConfig(position_scheme="zigzag").to_dict()["position_scheme"] == "zigzag"


def test_gpt_sw3_is_gpt2_under_another_name(tmp_path: Path) -> None:
    GPT2LMHeadModel(GPT2Config(vocab_size=61, n_embd=32, n_layer=1, n_head=4)).save_pretrained(tmp_path / "stock")
    path = tmp_path / "stock" / "config.json"
    path.write_text(path.read_text().replace('"model_type": "gpt2"', '"model_type": "gpt-sw3"'))
    stock = AutoModelForCausalLM.from_pretrained(tmp_path / "stock").eval()
    assert stock.config.model_type == "gpt-sw3"
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "stock", position_scheme="learned").eval()
    ids = tiny.tokens()
    assert loaded(ids).logits.equal(stock(ids).logits)
    assert hf_posenc.retrofit(stock, "alibi").config.position_scheme == "alibi"
    assert hf_posenc.inspect_checkpoint(tmp_path / "stock").kind == "stock"
    hf_posenc.convert_checkpoint(tmp_path / "stock", "alibi", tmp_path / "out")
    converted = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert converted(ids).logits.equal(stock.eval()(ids).logits)
