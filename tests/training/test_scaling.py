"""Fitting and analysis scale the logits as the attention module does, not by the size of its heads."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import hf_posenc
from hf_posenc.analysis import bias_by_distance
from hf_posenc.patches import architecture_of, base_models
from hf_posenc.training.attention_targets import LayerTarget, StockAttention
from tests.support import families
from tests.support import tiny_models as tiny

HEAD_SIZE = tiny.WIDTH // tiny.HEADS


def opt() -> Any:
    return families.model("opt", auto=families.auto_class("opt"))  # scales its queries itself


MODELS = {
    "unscaled": lambda: tiny.model("gpt2", scale_attn_weights=False),
    "by layer": lambda: tiny.model("gpt2", scale_attn_by_inverse_layer_idx=True),
    "stock": lambda: tiny.model("gpt2"),
    "opt": opt,
}


@pytest.mark.parametrize("name", MODELS)
def test_targets_are_the_weights_of_the_stock_model(name: str) -> None:
    stock, ids = MODELS[name]().eval(), tiny.tokens()
    stock.set_attn_implementation("eager")
    with torch.no_grad():
        expected = stock(ids, output_attentions=True).attentions
    stock_base = next(module for module in stock.modules() if isinstance(module, architecture_of(stock).base))
    variant = hf_posenc.retrofit(MODELS[name]().eval(), "alibi")
    targets: list[LayerTarget] = []
    StockAttention(stock_base, base_models(variant)[0]).visit_layers(ids, targets.append)
    assert len(targets) == len(expected)
    for target, weights in zip(targets, expected, strict=True):
        torch.testing.assert_close(target.log_weights.exp(), weights, rtol=0, atol=1e-6)
        flattened = torch.softmax(target.log_weights * math.sqrt(HEAD_SIZE), dim=-1)
        assert not torch.allclose(flattened, weights, rtol=0, atol=1e-3)  # control: another scale is seen


def test_biases_are_scaled_by_the_module() -> None:
    """transformer_xl's v term is a product with a key, and scaled like one."""
    scheme = {"type": "transformer_xl", "init": "paper"}
    scaled, unscaled = (tiny.model("gpt2", scheme, scale_attn_weights=scale) for scale in (True, False))
    unscaled.load_state_dict(scaled.state_dict())
    first, second = (bias_by_distance(model, 16).values for model in (scaled, unscaled))
    assert first.abs().max() > 0.1
    torch.testing.assert_close(second, first * math.sqrt(HEAD_SIZE), rtol=1e-5, atol=1e-6)
