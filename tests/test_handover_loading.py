"""Handing over where weights are loaded, configs are shared, or the model is part of another."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from cases import ARCHITECTURES
from handing import STEPS, handing, logits
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, EncoderDecoderModel, Trainer, TrainingArguments

import hf_posenc
from hf_posenc.grammar import parse
from hf_posenc.patches.handing import go_to
from hf_posenc.schedule import with_handover


def test_weights_bring_the_step_they_are_from_and_parts_of_them_bring_nothing() -> None:
    ids = tiny.tokens()
    for architecture in ("gpt2", "llama"):
        there, here = handing(architecture, "t5"), handing(architecture, "t5")
        handover = hf_posenc.Handover(here)
        here.load_state_dict({"lm_head.weight": here.state_dict()["lm_head.weight"]}, strict=False)
        assert here.config.position_scheme["handover"].get("step", 0) == 0
        go_to(there, 3)
        here.load_state_dict(there.state_dict())
        assert torch.equal(logits(here, ids), logits(there, ids))
        handover.step()
        assert handover.is_over
        assert parse(here.config.position_scheme) == parse("t5")
        with pytest.raises(ValueError, match="from step 3 of a handover"):
            here.load_state_dict(there.state_dict(), strict=False)


def test_weights_of_another_handover_are_refused() -> None:
    there = tiny.model("gpt2", with_handover("t5", STEPS + 1))
    with pytest.raises(ValueError, match="of 5 steps"):
        handing("gpt2", "t5").load_state_dict(there.state_dict())
    handover = hf_posenc.Handover(handing("gpt2", "t5"))
    with pytest.raises(ValueError, match="another handover"):
        handover.load_state_dict({"steps": 9, "shape": "linear", "step": 1})


@pytest.mark.parametrize("architecture", ["gpt2", "llama"])
def test_a_saved_variant_does_not_begin_to_hand_over(architecture: str, tmp_path: Path) -> None:
    scheme = with_handover("t5", STEPS)
    model = tiny.model(architecture, scheme, torch.float32)
    go_to(model, 2)
    model.save_pretrained(tmp_path / "middle")
    with pytest.raises(ValueError, match="begin it anew"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "middle", position_scheme=scheme)
    go_to(model, STEPS)
    model.save_pretrained(tmp_path / "end")
    for other in (scheme, with_handover("alibi", 3)):
        with pytest.raises(ValueError, match="no stock encoding"):
            AutoModelForCausalLM.from_pretrained(tmp_path / "end", position_scheme=other)


def test_models_that_share_a_config_hand_over_alone() -> None:
    config = tiny.config("gpt2", position_scheme=with_handover("alibi", STEPS))
    first, second = (tiny.HEADS_OF["gpt2"](config).eval() for _ in range(2))
    hf_posenc.Handover(first).step()
    logits(second, tiny.tokens())
    assert second.config.position_scheme["handover"].get("step", 0) == 0
    assert first.config.position_scheme["handover"]["step"] == 1


def test_a_trainer_of_another_model_is_refused(tmp_path: Path) -> None:
    arguments = TrainingArguments(str(tmp_path), max_steps=1, report_to="none", use_cpu=True, disable_tqdm=True)
    rows = [{"input_ids": row, "labels": row} for row in tiny.tokens()]
    one, other = (handing("gpt2", "alibi", torch.float32) for _ in range(2))
    with pytest.raises(ValueError, match="another model"):
        Trainer(one, arguments, train_dataset=rows, callbacks=[hf_posenc.Handover(other)]).train()


@pytest.mark.parametrize("scheme", ["t5", {"type": "rope", "layout": "interleaved"}])
def test_every_new_parameter_has_a_gradient_from_the_first_step_on(scheme: Any) -> None:
    for architecture in ARCHITECTURES:
        model = handing(architecture, scheme).train()
        hf_posenc.Handover(model)
        model(tiny.tokens(), labels=tiny.tokens()).loss.backward()
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and "pooler" not in name:
                assert parameter.grad is not None, name


def test_a_copy_goes_its_own_way() -> None:
    model = handing("bert", "deberta")
    other = copy.deepcopy(model)
    go_to(other, 2)
    ids = tiny.tokens()
    assert torch.equal(logits(model, ids), logits(handing("bert", "deberta"), ids))
    assert not torch.equal(logits(other, ids), logits(model, ids))


def test_stock_weights_are_the_start_and_not_the_end() -> None:
    for architecture in ("gpt2", "llama"):
        stock, model = tiny.model(architecture), handing(architecture, "alibi", seed=3)
        model.load_state_dict(stock.state_dict(), strict=False)
        assert torch.equal(logits(model, tiny.tokens()), logits(stock, tiny.tokens()))


def test_restore_thaws_what_was_frozen() -> None:
    for steps in (1, STEPS):
        model = tiny.model("gpt2")
        hf_posenc.Handover(model, "alibi", steps=STEPS)
        hf_posenc.Handover(model).go_to(steps)  # a second one for the same
        assert hf_posenc.restore(model).transformer.wpe.weight.requires_grad


def test_a_second_handover_is_saved_on_its_way(tmp_path: Path) -> None:
    """What the first one left out of its last save is none of the second one's."""
    model = tiny.model("llama", dtype=torch.float32)
    hf_posenc.Handover(model, "alibi", steps=STEPS).finish()
    hf_posenc.restore(model)
    hf_posenc.Handover(model, "t5", steps=STEPS).go_to(2)
    model.save_pretrained(tmp_path)
    assert load_file(tmp_path / "model.safetensors")["model.handover.progress"].tolist() == [2, STEPS]


def test_weights_of_the_end_say_so(tmp_path: Path) -> None:
    """Also where all else looks like stock weights, of a handover of another length, and in models of the end."""
    ended = handing("llama", "alibi", torch.float32)
    go_to(ended, STEPS)
    for steps in (STEPS, 2 * STEPS):
        model = tiny.model("llama", with_handover("alibi", steps), torch.float32, seed=3)
        model.load_state_dict(ended.state_dict())
        assert model.config.position_scheme == {"type": "alibi"}
        assert torch.equal(logits(model, tiny.tokens()), logits(ended, tiny.tokens()))
        model.save_pretrained(tmp_path)
        again, report = type(model).from_pretrained(tmp_path, output_loading_info=True)
        assert not any(report[word] for word in ("missing_keys", "unexpected_keys", "mismatched_keys"))
        again.load_state_dict(model.state_dict())
        model.load_state_dict(again.state_dict())


def test_composite_models_hand_over_in_both_parts_or_one(tmp_path: Path) -> None:
    tiny.composite_config()  # there are versions of transformers that have none
    for encoder_scheme in (with_handover("alibi", STEPS), "sinusoidal"):
        encoder = tiny.model("bert", encoder_scheme, torch.float32).bert
        decoder = tiny.model("bert-decoder", with_handover("t5", STEPS), torch.float32, add_cross_attention=True)
        model = EncoderDecoderModel(encoder=encoder, decoder=decoder).eval()
        handover = hf_posenc.Handover(model)
        ids = tiny.tokens()
        handover.step()
        model.save_pretrained(tmp_path / "on the way")
        again = EncoderDecoderModel.from_pretrained(tmp_path / "on the way")
        with torch.no_grad():
            expected = model(ids, decoder_input_ids=ids).logits
            torch.testing.assert_close(again(ids, decoder_input_ids=ids).logits, expected)
        handover.finish()
        model.save_pretrained(tmp_path / "end")
        assert parse(model.decoder.config.position_scheme) == parse("t5")


def test_a_scheme_that_peft_trains_comes_in() -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed")
    model = handing("gpt2", "t5", torch.float32)
    lora = peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["c_attn"], modules_to_save=["position_scheme.0"])
    wrapped = peft.get_peft_model(model, lora)
    handover = hf_posenc.Handover(wrapped)
    ids = tiny.tokens()
    handover.go_to(2)
    before = logits(wrapped, ids)
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "modules_to_save" in name:
                parameter.normal_()
    assert (logits(wrapped, ids) - before).abs().max() > 1e-3
    handover.finish()
    merged = wrapped.merge_and_unload()
    assert parse(merged.config.position_scheme) == parse("t5")
    assert all(scheme.strength == 1 for scheme in merged.transformer.position_scheme)
