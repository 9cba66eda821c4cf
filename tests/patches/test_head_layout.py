"""Heads are found in the weights of every family, and reordering them changes nothing."""

from __future__ import annotations

import pytest
import torch

from hf_posenc.patches import HeadLayout, architecture_of, find_head_layout
from tests.support import families
from tests.support import tiny_models as tiny

FAST = ["llama", "gpt2", "bert", "distilbert", "gpt_neox", "phi3", "olmo2", "qwen3", "modernbert"]
NOT_KNOWN = ["albert", "gpt_bigcode", "gpt_oss", "jetmoe", "diffllama", "afmoe"]
"""Their attention has other modules: shared by layers, one key for all heads, sinks, experts, gates."""
by_model_type = pytest.mark.parametrize(
    "model_type",
    [
        pytest.param(name, marks=[] if name in FAST else [pytest.mark.slow])
        for name in families.MODEL_TYPES
        if name not in NOT_KNOWN
    ],
)


def layouts_of(model: torch.nn.Module) -> list[HeadLayout | None]:
    architecture = architecture_of(model)
    base = next(module for module in model.modules() if isinstance(module, architecture.base))
    layers = base.get_submodule(architecture.layers).children()
    return [find_head_layout(layer, architecture, architecture.shape(base.config)) for layer in layers]


@by_model_type
def test_reordered_heads_compute_the_same(model_type: str) -> None:
    model, ids = families.model(model_type), tiny.tokens(2, 12)
    expected = families.output(model, ids)
    layouts = layouts_of(model)
    for layout in layouts:
        layout.reorder(rolled(layout))
    torch.testing.assert_close(families.output(model, ids), expected, rtol=0, atol=1e-5)
    for layout in layouts:  # control: values and outputs are left behind
        HeadLayout([rows for rows in layout.rows if rows.role in ("query", "key")]).reorder(rolled(layout))
    assert families.differ(families.output(model, ids), expected)


def rolled(layout: HeadLayout) -> torch.Tensor:
    """Another order: the groups of heads shifted by one, and the heads of each group reversed."""
    return torch.arange(tiny.HEADS).view(-1, layout.group_size).roll(1, 0).flip(1).flatten()


@pytest.mark.parametrize("model_type", [name for name in NOT_KNOWN if name in families.MODEL_TYPES])
def test_unknown_weights_are_left_alone(model_type: str) -> None:
    assert None in layouts_of(families.model(model_type))


@pytest.mark.parametrize("architecture", ["gpt2", "bert", "llama"])
def test_transformed_queries_equal_transformed_projections(architecture: str) -> None:
    model, states = tiny.model(architecture, "none"), torch.randn(2, 7, tiny.WIDTH, dtype=torch.float64)
    attention = model.base_model.architecture.self_attentions(model.base_model)[1]
    matrices = torch.randn(tiny.HEADS, 8, 8, dtype=torch.float64)
    before = attention.project(states)
    layouts_of(model)[1].transform_queries(matrices)
    after = attention.project(states)
    expected = torch.einsum("hde,bhne->bhnd", matrices, before.query_BHND)
    torch.testing.assert_close(after.query_BHND, expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(after.key_BGND, before.key_BGND, rtol=0, atol=0)
