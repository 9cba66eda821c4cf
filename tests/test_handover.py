"""Handing over: the stock model at the start, the pure scheme at the end, and a known mixture on the way."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from accelerate import Accelerator
from cases import ARCHITECTURES, pairs
from transformers import AutoModelForCausalLM, EncoderDecoderModel, Trainer, TrainingArguments

import hf_posenc
from hf_posenc.grammar import parse
from hf_posenc.patches.attach import Progress
from hf_posenc.patches.handing import go_to
from hf_posenc.schedule import Schedule, with_handover

STEPS = 4


def logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(ids, use_cache=False).logits


def handing(architecture: str, scheme: Any, dtype: torch.dtype = torch.float64, **changes: Any) -> Any:
    return tiny.model(architecture, with_handover(scheme, STEPS), dtype, **changes)


@pytest.mark.parametrize(
    ("handover", "message"),
    [
        ("soon", "is a dict"),
        ({"from": "stock"}, "needs steps"),
        ({"steps": 0}, "at least 1"),
        ({"steps": 2.5}, "whole number"),
        ({"steps": True}, "whole number"),
        ({"steps": 5, "step": -1}, "at least 0"),
        ({"steps": 5, "shape": "step"}, "shape is one of"),
        ({"steps": 5, "from": "alibi"}, 'from is "stock"'),
        ({"steps": 5, "to": "alibi"}, "unknown option 'to'"),
    ],
)
def test_wrong_handovers_are_refused(handover: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"t5: .*{message}"):
        parse({"type": "t5", "handover": handover})


def test_a_list_has_one_handover() -> None:
    items = [{"type": name, "handover": {"steps": steps}} for name, steps in (("t5", 5), ("rope", 6))]
    with pytest.raises(ValueError, match="say it once"):
        parse(items)
    assert parse(with_handover(["t5", "rope"], 5))[1].handover == Schedule(5)


def test_shares_rise_from_nothing_to_all() -> None:
    for shape in ("linear", "cosine"):
        shares = [Schedule(8, shape, step).share for step in range(9)]  # type: ignore[arg-type]
        assert (shares[0], shares[8]) == (0, 1)
        assert shares[4] == pytest.approx(0.5)
        assert shares == sorted(shares)
    assert Schedule(8, "cosine", 1).share < Schedule(8, "linear", 1).share


@pairs(ARCHITECTURES)
@pytest.mark.parametrize("training", [False, True])
def test_starts_as_the_stock_model(case: Any, architecture: str, training: bool) -> None:
    ids = tiny.tokens(2, 20)
    stock, model = tiny.model(architecture, dtype=torch.float32), handing(architecture, case.scheme, torch.float32)
    found, expected = logits(model.train(training), ids), logits(stock.train(training), ids)
    # In training new schemes take part, at no strength at all, so that every parameter has a gradient.
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6 * float(expected.abs().max()))
    go_to(model, 1)
    own = "rope" if architecture == "llama" else "learned"
    assert (logits(model, ids) - expected).abs().max() > 1e-4 or case.id == own


@pairs(ARCHITECTURES)
def test_ends_as_the_pure_scheme(case: Any, architecture: str) -> None:
    ids = tiny.tokens(2, 20)
    pure, model = tiny.model(architecture, case.scheme), handing(architecture, case.scheme)
    for step in range(1, STEPS + 1):
        go_to(model, step)
    assert set(model.state_dict()) == set(pure.state_dict())
    assert parse(model.config.position_scheme) == parse(pure.config.position_scheme)
    assert tiny.base_of(model).active_schemes == tiny.base_of(pure).active_schemes
    modules = [type(module) for module in model.modules() if not isinstance(module, Progress)]
    assert modules == [type(module) for module in pure.modules()]
    model.load_state_dict(pure.state_dict())
    assert torch.equal(logits(model, ids), logits(pure, ids))


@pairs(ARCHITECTURES)
def test_a_checkpoint_on_the_way_goes_on_as_it_was(case: Any, architecture: str, tmp_path: Path) -> None:
    ids = tiny.tokens(2, 20)
    model = handing(architecture, case.scheme)
    go_to(model, 1)
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path, dtype=torch.float64)
    found = logits(again, ids)
    torch.testing.assert_close(found, logits(model, ids), rtol=0, atol=1e-12)
    for each in (model, again):
        go_to(each, 3)
    torch.testing.assert_close(logits(again, ids), logits(model, ids), rtol=0, atol=1e-12)
    own = "rope" if architecture == "llama" else "learned"
    assert (logits(again, ids) - found).abs().max() > 1e-4 or case.id == own


def test_llama_turns_by_less_while_slopes_grow() -> None:
    ids = tiny.tokens(2, 20)
    model = handing("llama", {"type": "alibi", "learned": True})
    go_to(model, 1)
    turned = {"type": "rope", "scaling": {"rope_type": "linear", "factor": 4 / 3}}
    expected = tiny.model("llama", [turned, {"type": "alibi", "learned": True}])
    slopes = {name: p for name, p in expected.named_parameters() if name.endswith("slopes")}
    own = next(p for name, p in model.named_parameters() if name.endswith("slopes"))
    with torch.no_grad():
        slopes["model.position_scheme.1.slopes"].copy_(own / 4)
    torch.testing.assert_close(logits(model, ids), logits(expected, ids), **tiny.same("llama"))
    go_to(model, 2)
    assert (logits(model, ids) - logits(expected, ids)).abs().max() > 1e-3


@pytest.mark.parametrize("architecture", ["bert", "gpt2"])
def test_a_table_fades_while_a_bias_grows(architecture: str) -> None:
    ids = tiny.tokens(2, 20)
    model, expected = handing(architecture, "t5"), tiny.model(architecture, ["learned", "t5"])
    go_to(model, 1)
    own = dict(model.named_parameters())
    with torch.no_grad():
        for name, parameter in expected.named_parameters():
            if name.endswith(("wpe.weight", "position_embeddings.weight")):
                parameter.copy_(own[name] * 0.75)
            elif name.endswith("table.weight"):
                parameter.copy_(own[name.replace("position_scheme.1", "position_scheme.0")] * 0.25)
    torch.testing.assert_close(logits(model, ids), logits(expected, ids), **tiny.same(architecture))


def test_llama_can_drop_its_positions() -> None:
    ids = tiny.tokens(1, 20)
    model = handing("llama", "none")
    assert torch.equal(logits(model, ids), logits(tiny.model("llama"), ids))
    for step in range(1, STEPS + 1):
        go_to(model, step)
    order = torch.cat([ids[:, :-1].flip(1), ids[:, -1:]], dim=1)
    torch.testing.assert_close(logits(model, ids)[:, -1], logits(tiny.model("llama", "none"), ids)[:, -1])
    first_layer = tiny.model("llama", "none", num_hidden_layers=1)
    torch.testing.assert_close(logits(first_layer, ids)[:, -1], logits(first_layer, order)[:, -1], atol=1e-6, rtol=0)


@pytest.mark.parametrize("architecture", ["gpt2", "llama"])
@pytest.mark.parametrize("scheme", ["alibi", "rope", "t5", "deberta", "xpos", "sinusoidal"])
def test_decoding_on_the_way(architecture: str, scheme: str) -> None:
    model = handing(architecture, scheme)
    go_to(model, 3)
    ids = tiny.tokens(2, 10)
    with torch.no_grad():
        cache = model(ids[:, :7], use_cache=True).past_key_values
        found = model(ids[:, 7:], past_key_values=cache).logits
    torch.testing.assert_close(found, logits(model, ids)[:, 7:], **tiny.same(architecture))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("step", [0, 2, STEPS])
def test_restore_gives_the_stock_model_back(architecture: str, step: int) -> None:
    ids = tiny.tokens(1, 9)
    model = handing(architecture, ["sinusoidal", "alibi"])
    go_to(model, step)
    hf_posenc.restore(model)
    stock = tiny.model(architecture)
    assert type(model) is type(stock)
    assert set(model.state_dict()) == set(stock.state_dict())
    assert torch.equal(logits(model, ids), logits(stock, ids))


def test_one_table_that_goes_on_is_never_weakened() -> None:
    ids = tiny.tokens(1, 9)
    model, stock = handing("gpt2", ["learned", "alibi"]), tiny.model("gpt2")
    go_to(model, 2)
    with torch.no_grad():
        assert torch.equal(model.transformer.wpe(torch.arange(9)), stock.transformer.wpe(torch.arange(9)))
    assert not torch.equal(logits(model, ids), logits(stock, ids))


def test_an_interpolated_table_has_nothing_to_hand_over() -> None:
    scheme = {"type": "learned", "max_positions": 96, "extend": "interpolate"}
    with pytest.raises(ValueError, match="leave handover out"):
        tiny.model("gpt2", with_handover(scheme, 3))


# The object


def test_handover_changes_a_stock_model_and_refuses_what_hands_nothing_over() -> None:
    model = tiny.model("gpt2", dtype=torch.float32)
    with pytest.raises(ValueError, match="hands nothing over"):
        hf_posenc.Handover(tiny.model("gpt2", "alibi"))
    with pytest.raises(ValueError, match="needs steps"):
        hf_posenc.Handover(model, "alibi")
    with pytest.raises(ValueError, match="steps goes with"):
        hf_posenc.Handover(handing("gpt2", "alibi"), steps=3)
    handover = hf_posenc.Handover(model, "alibi", steps=3, shape="cosine")
    assert model.config.position_scheme["handover"]["shape"] == "cosine"
    assert not model.transformer.wpe.weight.requires_grad
    for expected in (0.25, 0.75, 1.0):
        assert not handover.is_over
        handover.step()
        assert handover.share == pytest.approx(expected)
    assert handover.is_over
    assert model.config.position_scheme == {"type": "alibi"}
    handover.step()
    with pytest.raises(ValueError, match="load that checkpoint"):
        handover.load_state_dict({"steps": 3, "shape": "cosine", "step": 1})


def test_training_without_a_handover_object_warns(caplog: pytest.LogCaptureFixture) -> None:
    from hf_posenc.patches.classes import logger

    logger.warning_once.cache_clear()
    logger.propagate, before = True, logger.propagate
    try:
        model = handing("gpt2", "alibi").train()
        model(tiny.tokens())
        assert "nothing moves its handover along" in caplog.text
        caplog.clear()
        logger.warning_once.cache_clear()
        hf_posenc.Handover(model)
        model(tiny.tokens())
        assert not caplog.text
    finally:
        logger.propagate = before


def batches(count: int) -> list[torch.Tensor]:
    return [tiny.tokens(2, 16, seed) for seed in range(count)]


def trained(model: Any, directory: Path, resume: Any = None, steps: int = 6) -> Any:
    rows = [{"input_ids": row, "labels": row} for batch in batches(steps) for row in batch]
    arguments = TrainingArguments(
        str(directory),
        max_steps=steps,
        per_device_train_batch_size=2,
        learning_rate=1e-2,
        save_steps=1,
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        seed=3,
    )
    trainer = Trainer(model, arguments, train_dataset=rows, callbacks=[hf_posenc.Handover(model)])
    trainer.train(resume_from_checkpoint=resume)
    return model


@pytest.mark.parametrize("architecture", ["gpt2", "llama"])
def test_trainer_hands_over_and_resumes(architecture: str, tmp_path: Path) -> None:
    def fresh() -> Any:
        return handing(architecture, ["t5", "kerple"], torch.float32)

    whole = trained(fresh(), tmp_path / "whole")
    assert whole.config.position_scheme == ["t5", {"type": "kerple"}]
    stock = tiny.model(architecture, dtype=torch.float32)
    assert set(stock.state_dict()) & set(whole.state_dict()) >= {"lm_head.weight"}
    for step in (2, 5):  # on the way, and behind the end
        again = trained(fresh(), tmp_path / "whole", resume=str(tmp_path / "whole" / f"checkpoint-{step}"))
        for (name, found), expected in zip(again.state_dict().items(), whole.state_dict().values(), strict=True):
            assert torch.equal(found, expected), name
    middle = AutoModelForCausalLM.from_pretrained(tmp_path / "whole" / "checkpoint-2")
    assert middle.config.position_scheme[1]["handover"]["step"] == 2
    last = AutoModelForCausalLM.from_pretrained(tmp_path / "whole" / "checkpoint-6")
    assert torch.equal(logits(last, tiny.tokens()), logits(whole.eval(), tiny.tokens()))


def test_a_new_run_goes_on_from_a_model_saved_on_the_way(tmp_path: Path) -> None:
    model = handing("gpt2", "alibi", torch.float32)
    go_to(model, 3)
    trained(model, tmp_path, steps=1)
    assert model.config.position_scheme == {"type": "alibi"}


@pytest.mark.parametrize("stop", [2, 5])
def test_a_loop_on_accelerate_resumes(stop: int, tmp_path: Path) -> None:
    def run(start: int, end: int, load: bool) -> dict[str, torch.Tensor]:
        accelerator = Accelerator(cpu=True)
        model = handing("bert", "deberta", torch.float32).train()
        handover = hf_posenc.Handover(model)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
        model, optimizer = accelerator.prepare(model, optimizer)
        accelerator.register_for_checkpointing(handover)
        if load:
            accelerator.load_state(str(tmp_path))
        for ids in batches(end)[start:]:
            accelerator.backward(model(ids, labels=ids).loss)
            optimizer.step()
            optimizer.zero_grad()
            handover.step()
        if not load:
            accelerator.save_state(str(tmp_path))
        return copy.deepcopy(accelerator.unwrap_model(model).state_dict())

    run(0, stop, load=False)
    resumed = run(stop, 7, load=True)
    whole = run(0, 7, load=False)
    assert set(resumed) == set(whole)
    for name, expected in whole.items():
        assert torch.equal(resumed[name], expected), name


def test_converted_files_hand_over_too(tmp_path: Path) -> None:
    tiny.model("gpt2", dtype=torch.float32).save_pretrained(tmp_path / "stock")
    scheme = with_handover("kerple", 5)
    done = hf_posenc.convert_checkpoint(tmp_path / "stock", scheme, tmp_path / "variant")
    assert not done.dropped
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "variant")
    expected = AutoModelForCausalLM.from_pretrained(tmp_path / "stock", position_scheme=scheme)
    assert torch.equal(logits(found, tiny.tokens()), logits(expected, tiny.tokens()))
    stock = AutoModelForCausalLM.from_pretrained(tmp_path / "stock")
    assert torch.equal(logits(found, tiny.tokens()), logits(stock, tiny.tokens()))


# What is loaded, shared, or not the model it should be


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
        handover = hf_posenc.Handover(model, "alibi", steps=STEPS)
        handover.go_to(steps)
        assert hf_posenc.restore(model).transformer.wpe.weight.requires_grad


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
