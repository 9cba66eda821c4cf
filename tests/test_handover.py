"""Handing over: the stock model at the start, the pure scheme at the end, and a known mixture on the way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from cases import ARCHITECTURES, pairs
from handing import STEPS, handing, logits
from safetensors.torch import load_file
from transformers.utils import SAFE_WEIGHTS_NAME as FILE

import hf_posenc
from hf_posenc.grammar import parse
from hf_posenc.patches.attach import Progress
from hf_posenc.patches.handing import go_to
from hf_posenc.schedule import Schedule, with_handover


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
def test_ends_as_the_pure_scheme(case: Any, architecture: str, tmp_path: Path) -> None:
    ids = tiny.tokens(2, 20)
    pure, model = tiny.model(architecture, case.scheme), handing(architecture, case.scheme)
    for step in range(1, STEPS + 1):
        go_to(model, step)
    (mark,) = set(model.state_dict()) - set(pure.state_dict())  # that it is over
    assert mark.endswith("handover.progress")
    assert set(pure.state_dict()) <= set(model.state_dict())
    assert parse(model.config.position_scheme) == parse(pure.config.position_scheme)
    assert tiny.base_of(model).active_schemes == tiny.base_of(pure).active_schemes
    modules = [type(module) for module in model.modules() if not isinstance(module, Progress)]
    assert modules == [type(module) for module in pure.modules()]
    model.load_state_dict(pure.state_dict())
    assert torch.equal(logits(model, ids), logits(pure, ids))
    pure.load_state_dict(model.state_dict())
    for name, saved in (("model", model), ("pure", pure)):
        saved.save_pretrained(tmp_path / name)
    assert set(load_file(tmp_path / "model" / FILE)) == set(load_file(tmp_path / "pure" / FILE))


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
