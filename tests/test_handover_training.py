"""Handing over in training: the object that moves a model along, under a Trainer, in a loop, and in copies of it."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from accelerate import Accelerator
from handing import handing, logits
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

import hf_posenc
from hf_posenc.patches.handing import go_to
from hf_posenc.schedule import with_handover


def test_handover_changes_a_stock_model_and_refuses_what_hands_nothing_over() -> None:
    model = tiny.model("gpt2", dtype=torch.float32)
    with pytest.raises(ValueError, match="hands nothing over"):
        hf_posenc.Handover(tiny.model("gpt2", "alibi"))
    with pytest.raises(ValueError, match="needs steps"):
        hf_posenc.Handover(model, "alibi")
    for given in ({"steps": 3}, {"shape": "cosine"}):
        with pytest.raises(ValueError, match="the model names its handover"):
            hf_posenc.Handover(handing("gpt2", "alibi"), **given)
        with pytest.raises(ValueError, match="the position_scheme names its handover"):
            hf_posenc.Handover(model, with_handover("alibi", 3), **given)
    handover = hf_posenc.Handover(model, "alibi", steps=3, shape="cosine")
    assert model.config.position_scheme["handover"]["shape"] == "cosine"
    assert not model.transformer.wpe.weight.requires_grad
    with pytest.raises(ValueError, match="no step -3"):
        handover.go_to(-3)
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


def test_a_run_that_began_on_the_way_resumes_behind_the_end(tmp_path: Path) -> None:
    """Weights of the end look like stock ones where nothing but angles was there; the Trainer's steps tell less."""

    def begun() -> Any:
        model = handing("llama", "alibi", torch.float32)
        go_to(model, 2)
        return model

    whole = trained(begun(), tmp_path / "whole", steps=4)
    again = trained(begun(), tmp_path / "again", str(tmp_path / "whole" / "checkpoint-3"), steps=4)
    assert again.config.position_scheme == whole.config.position_scheme == {"type": "alibi"}
    for (name, found), expected in zip(again.state_dict().items(), whole.state_dict().values(), strict=True):
        assert torch.equal(found, expected), name


@pytest.mark.parametrize("registered", [True, False])
@pytest.mark.parametrize("stop", [2, 5])
@pytest.mark.parametrize(
    ("architecture", "scheme"),
    [("bert", "deberta"), ("llama", "alibi"), ("llama", "none"), ("gpt2", ["learned", "alibi"])],
)
def test_a_loop_on_accelerate_resumes(
    architecture: str, scheme: Any, stop: int, registered: bool, tmp_path: Path
) -> None:
    def run(start: int, end: int, load: bool) -> dict[str, torch.Tensor]:
        accelerator = Accelerator(cpu=True)
        model = handing(architecture, scheme, torch.float32).train()
        handover = hf_posenc.Handover(model)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
        model, optimizer = accelerator.prepare(model, optimizer)
        if registered:
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
