"""A warm start of a variant on another device or of another dtype makes no second copy of the stock model."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hf_posenc.patches import architecture_of
from hf_posenc.training.attention_targets import LayerTarget, StockAttention, place_attention
from tests.support import tiny_models as tiny


def stock_and_variant(architecture: str) -> tuple[Any, Any]:
    """A stock model in bfloat16 and its variant in float32; both are base models."""
    stock = tiny.model(architecture, dtype=torch.bfloat16).base_model
    return stock, tiny.model(architecture, "t5", torch.float32).base_model


def layer_dtypes(model: Any) -> list[set[torch.dtype]]:
    layers = model.get_submodule(architecture_of(model).layers)
    return [{parameter.dtype for parameter in layer.parameters()} for layer in layers]


@pytest.mark.parametrize("architecture", ["gpt2", "bert", "llama"])
def test_layers_are_converted_one_at_a_time(architecture: str) -> None:
    stock, variant = stock_and_variant(architecture)
    before = {name: (parameter, parameter.data_ptr()) for name, parameter in stock.named_parameters()}
    input_ids, targets, expected = tiny.tokens(2, 8), [], []

    def visit(target: LayerTarget) -> None:
        dtypes = layer_dtypes(stock)
        assert dtypes.pop(target.layer) == {torch.float32}
        assert all(others == {torch.bfloat16} for others in dtypes)
        targets.append(target)

    StockAttention(stock, variant).visit_layers(input_ids, visit)
    after = {name: (parameter, parameter.data_ptr()) for name, parameter in stock.named_parameters()}
    assert all(after[name][0] is before[name][0] and after[name][1] == before[name][1] for name in before)
    assert all(parameter.dtype == torch.bfloat16 for parameter in stock.parameters())
    StockAttention(stock.float(), variant).visit_layers(input_ids, expected.append)
    assert len(targets) == len(expected) == stock.config.num_hidden_layers
    for target, other in zip(targets, expected, strict=True):
        assert torch.equal(target.log_weights, other.log_weights)
        assert torch.equal(target.content_BNE, other.content_BNE)


def test_an_error_leaves_the_stock_model_as_it_was() -> None:
    stock, variant = stock_and_variant("llama")

    def fail(target: LayerTarget) -> None:
        raise RuntimeError("in a layer")

    with pytest.raises(RuntimeError, match="in a layer"):
        StockAttention(stock, variant).visit_layers(tiny.tokens(2, 8), fail)
    assert layer_dtypes(stock) == [{torch.bfloat16}] * stock.config.num_hidden_layers


def test_only_attention_is_moved_to_the_device() -> None:
    model = tiny.model("llama", {"type": "t5", "shared": False}, torch.float32)
    place_attention(model, torch.device("meta"))
    stayed = {name for name, parameter in model.named_parameters() if not parameter.is_meta}
    layers = [f"model.layers.{number}." for number in range(model.config.num_hidden_layers)]
    expected = [f"{layer}mlp.{name}_proj.weight" for layer in layers for name in ("gate", "up", "down")]
    expected += [f"{layer}{name}_layernorm.weight" for layer in layers for name in ("input", "post_attention")]
    assert stayed == {*expected, "lm_head.weight"}
