"""Variants of classes that are not plain heads: users' subclasses, double heads, adapters and composite models."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2LMHeadModel

import hf_posenc
from hf_posenc.errors import PosEncError
from tests.support import tiny_models as tiny


def test_a_users_own_subclass_gets_its_variant() -> None:
    class Louder(GPT2LMHeadModel):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            output = super().forward(*args, **kwargs)
            output.logits = 2 * output.logits
            return output

    torch.manual_seed(0)
    loud = Louder(tiny.config("gpt2", position_scheme="rope")).eval()
    assert isinstance(loud, Louder)
    assert type(loud.transformer).__name__ == "PosEncGPT2Model"
    ids = tiny.tokens()
    quiet = GPT2LMHeadModel(tiny.config("gpt2", position_scheme="rope")).eval()
    quiet.load_state_dict(loud.state_dict())
    assert torch.equal(loud(ids).logits, 2 * quiet(ids).logits)


@pytest.mark.parametrize("architecture", ["bert", "gpt2", "llama"])
def test_attention_replaced_after_the_scheme_is_refused(architecture: str) -> None:
    """A subclass that builds its own attention after `super().__init__()` would silently lose the scheme."""
    model, stock, ids = tiny.model(architecture, "alibi"), tiny.model(architecture), tiny.tokens()
    path = {"bert": "encoder.layer.1.attention.self", "gpt2": "h.1.attn", "llama": "layers.1.self_attn"}[architecture]
    intact = copy.deepcopy(model)
    model.base_model.set_submodule(path, stock.base_model.get_submodule(path))
    with pytest.raises(PosEncError, match="attention of layer 1 is a .* hf_posenc.retrofit"):
        model(ids)
    intact(ids)


def test_double_heads_read_choices_as_stock_does() -> None:
    """Embeddings are added before the stock model lays its choices out flat: the result must not differ for it."""
    from transformers import GPT2DoubleHeadsModel

    torch.manual_seed(0)
    stock = GPT2DoubleHeadsModel(tiny.config("gpt2")).eval()
    ids, mask = tiny.tokens(6, 8).view(2, 3, 8), torch.ones(2, 3, 8, dtype=torch.long)
    inputs = {"attention_mask": mask, "token_type_ids": torch.ones_like(ids), "mc_token_ids": torch.full((2, 3), 7)}
    with torch.no_grad():
        expected = stock(ids, **inputs, output_hidden_states=True)
        actual = hf_posenc.retrofit(stock, "learned")(ids, **inputs, output_hidden_states=True)
    torch.testing.assert_close(actual.logits, expected.logits, rtol=0, atol=1e-6)
    torch.testing.assert_close(actual.mc_logits, expected.mc_logits, rtol=0, atol=1e-6)
    assert [state.shape for state in actual.hidden_states] == [state.shape for state in expected.hidden_states]


def test_an_adapter_does_not_name_the_stock_checkpoint(tmp_path: Path) -> None:
    """PEFT writes the path of the model it adapts, and loads that again: it must not be the stock one."""
    peft = pytest.importorskip("peft", reason="PEFT is not installed")
    tiny.model("gpt2", dtype=torch.float32).save_pretrained(tmp_path / "stock")
    fresh = AutoModelForCausalLM.from_pretrained(tmp_path / "stock", position_scheme="alibi")
    live = hf_posenc.retrofit(AutoModelForCausalLM.from_pretrained(tmp_path / "stock"), "alibi")
    for model in (fresh, live):
        adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, fan_in_fan_out=True))
        assert adapted.peft_config["default"].base_model_name_or_path in (None, "")
    fresh = AutoModelForCausalLM.from_pretrained(tmp_path / "stock", position_scheme="alibi")
    fresh.save_pretrained(tmp_path / "variant")
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "variant")
    adapted = peft.get_peft_model(saved, peft.LoraConfig(r=2, fan_in_fan_out=True, task_type="CAUSAL_LM"))
    adapted.save_pretrained(tmp_path / "adapter")
    loaded = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter")
    assert type(loaded.get_base_model()).__name__ == "PosEncGPT2LMHeadModel"
    live = hf_posenc.retrofit(AutoModelForCausalLM.from_pretrained(tmp_path / "stock"), "alibi")
    unsaved = peft.get_peft_model(live, peft.LoraConfig(r=2, fan_in_fan_out=True, task_type="CAUSAL_LM"))
    unsaved.save_pretrained(tmp_path / "unsaved")
    with pytest.raises(Exception, match="(?i)base|repo|connect|model"):  # it names no base, so none is guessed
        peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "unsaved")


def test_composite_models_keep_the_scheme(tmp_path: Path) -> None:
    from transformers import EncoderDecoderModel

    config = tiny.composite_config()
    with hf_posenc.patched("alibi"):
        model = EncoderDecoderModel(config)
    model.eval().save_pretrained(tmp_path)
    loaded = EncoderDecoderModel.from_pretrained(tmp_path)
    assert type(loaded.encoder).__name__ == "PosEncBertModel"
    assert type(loaded.decoder).__name__ == "PosEncBertLMHeadModel"
    ids = tiny.tokens()
    with torch.no_grad():
        expected = model(input_ids=ids, decoder_input_ids=ids).logits
        torch.testing.assert_close(loaded(input_ids=ids, decoder_input_ids=ids).logits, expected, rtol=0, atol=1e-6)
