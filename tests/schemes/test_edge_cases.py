"""Cases in which a scheme could be silently wrong."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import hf_posenc
from hf_posenc.errors import PosEncError
from tests.support import tiny_models as tiny
from tests.support.cases import CASES, Case


@pytest.mark.parametrize("scheme", ["tupe", {"type": "deberta", "share_projections": False}], ids=["tupe", "deberta"])
def test_every_head_receives_gradients_from_the_neutral_start(scheme: Any) -> None:
    """Also if the heads together are wider than the model: no head may start between zeros on both sides."""
    model = tiny.model("llama", dtype=torch.float32, head_dim=16)
    hf_posenc.retrofit(model, ["rope", scheme]).train()
    for _ in range(2):  # the first step moves what was zero, the second what it is multiplied with
        model(tiny.tokens(2, 12)).logits.square().mean().backward()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "position_scheme" in name:
                    parameter -= 0.1 * parameter.grad
    for name, parameter in model.named_parameters():
        if name.endswith(("query_projection", "key_projection")):
            assert (parameter.grad.view(tiny.HEADS, -1).abs().amax(-1) > 0).all(), name


def test_the_stock_table_is_learned_once() -> None:
    with pytest.raises(PosEncError, match="learned"):
        tiny.model("gpt2", ["learned", "learned"])
    assert tiny.model("llama", ["learned", "learned"]) is not None  # LLaMA has no table: the schemes add two


def test_cope_needs_a_causal_model() -> None:
    for architecture, changes in (("bert", {}), ("gpt2", {"is_causal": False})):
        with pytest.raises(ValueError, match="cope.*causal"):
            tiny.model(architecture, "cope", **changes)


def test_nan_propagates_through_cope() -> None:
    """A NaN must not become the index of a table row."""
    model = tiny.model("gpt2", "cope")
    inputs_embeds = model.get_input_embeddings()(tiny.tokens(1, 8)).detach()
    inputs_embeds[0, 3, 0] = float("nan")
    assert model(inputs_embeds=inputs_embeds).logits[0, 3:].isnan().all()


@pytest.mark.parametrize("scheme", ["polynomial", "exponential"])
def test_autocast_keeps_neighboring_positions_distinct(scheme: str) -> None:
    model = tiny.model("gpt2", scheme, torch.float32, n_positions=2048).transformer
    with torch.autocast("cpu", torch.bfloat16):
        positions = model.prepare_inputs({"inputs_embeds": torch.zeros(1, 2048, tiny.WIDTH)}).positions
        vectors = model.position_scheme[0].position_embeddings(positions)[0]
    assert vectors.unique(dim=0).shape[0] == 2048


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_scheme_parameters_may_be_wider_than_the_model(case: Case) -> None:
    """As in training on frozen weights in half precision."""
    model = tiny.model("gpt2", case.scheme, torch.bfloat16)
    trained = [parameter for name, parameter in model.named_parameters() if "position_scheme" in name]
    for parameter in trained:
        parameter.data = parameter.data.float()
    logits = model(tiny.tokens(2, 12)).logits
    assert logits.dtype == torch.bfloat16
    logits.float().square().mean().backward()
    assert {parameter.grad.dtype for parameter in trained if parameter.grad is not None} <= {torch.float32}


def test_no_parameter_is_without_an_axis() -> None:
    """FSDP and ZeRO cannot divide those."""
    for case in CASES:
        for name, parameter in tiny.model("llama", case.scheme).named_parameters():
            assert parameter.dim() > 0, (case.id, name)
