"""Reordered rotary features and extended tables compute the same as before."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2LMHeadModel, LlamaForCausalLM

import hf_posenc
from hf_posenc import PosEncError
from hf_posenc.checkpoints.weights import RotaryChange, rotary_feature_order
from hf_posenc.schemes.learned import extended_rows
from tests.support import tiny_models as tiny

INTERLEAVED = {"type": "rope", "layout": "interleaved"}
HEAD_SIZE = tiny.WIDTH // tiny.HEADS


def compute_logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(ids).logits


def reorder_rotary(weight: torch.Tensor, change: RotaryChange, head_size: int, rotary_size: int | None = None) -> Any:
    order = rotary_feature_order(change, head_size, rotary_size or head_size)
    return torch.cat([head[order] for head in weight.split(head_size)])


@pytest.mark.parametrize("rotary_size", [None, 4])
def test_reordering_can_be_undone(rotary_size: int | None) -> None:
    weight = torch.randn(24, 5)
    interleaved = reorder_rotary(weight, "halves_to_interleaved", 8, rotary_size)
    assert not torch.equal(interleaved, weight)
    assert torch.equal(reorder_rotary(interleaved, "interleaved_to_halves", 8, rotary_size), weight)


def test_feature_order() -> None:
    assert rotary_feature_order("interleaved_to_halves", 6, 6) == [0, 2, 4, 1, 3, 5]
    with pytest.raises(PosEncError, match="pairs"):
        rotary_feature_order("interleaved_to_halves", 7, 7)


@pytest.mark.parametrize("max_shard_size", ["20KB", "5GB"])
def test_interleaved_llama_equals_stock(max_shard_size: str, tmp_path: Path) -> None:
    stock = tiny.model("llama", dtype=torch.float32, attention_bias=True)
    stock.save_pretrained(tmp_path / "stock", max_shard_size=max_shard_size)
    ids = tiny.tokens()
    conversion = hf_posenc.convert_checkpoint(
        tmp_path / "stock", INTERLEAVED, tmp_path / "out", rotary_weights="halves_to_interleaved"
    )
    assert conversion.rewritten_shards
    converted = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    torch.testing.assert_close(compute_logits(converted, ids), compute_logits(stock, ids), rtol=0, atol=1e-5)
    hf_posenc.convert_checkpoint(tmp_path / "stock", INTERLEAVED, tmp_path / "wrong")
    not_reordered = AutoModelForCausalLM.from_pretrained(tmp_path / "wrong")
    assert (compute_logits(not_reordered, ids) - compute_logits(stock, ids)).abs().max() > 1e-2
    for name, parameter in stock.named_parameters():
        reordered = name.endswith(("q_proj.weight", "k_proj.weight", "q_proj.bias", "k_proj.bias"))
        new = converted.get_parameter(name)
        assert torch.equal(new, parameter) is not reordered, name
        if reordered:
            assert torch.equal(reorder_rotary(new, "interleaved_to_halves", HEAD_SIZE), parameter)


def test_interleaved_weights_become_those_of_transformers(tmp_path: Path) -> None:
    stock = tiny.model("llama", dtype=torch.float32)
    interleaved: Any = LlamaForCausalLM(stock.config)
    state = {
        name: reorder_rotary(tensor, "halves_to_interleaved", HEAD_SIZE)
        if name.endswith(("q_proj.weight", "k_proj.weight"))
        else tensor
        for name, tensor in stock.state_dict().items()
    }
    interleaved.load_state_dict(state)
    interleaved.save_pretrained(tmp_path / "meta")
    hf_posenc.convert_checkpoint(tmp_path / "meta", "rope", tmp_path / "out", rotary_weights="interleaved_to_halves")
    converted = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert torch.equal(compute_logits(converted, tiny.tokens()), compute_logits(stock, tiny.tokens()))


@pytest.mark.parametrize(
    ("architecture", "scheme", "match"), [("gpt2", "rope", "gpt2"), ("llama", INTERLEAVED, "layout.*halves")]
)
def test_rotary_weights_that_do_not_apply(architecture: str, scheme: Any, match: str, tmp_path: Path) -> None:
    tiny.model(architecture, dtype=torch.float32).save_pretrained(tmp_path / "stock")
    with pytest.raises(PosEncError, match=match):
        hf_posenc.convert_checkpoint(
            tmp_path / "stock", scheme, tmp_path / "out", rotary_weights="interleaved_to_halves"
        )
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("method", ["interpolate", "tile", "hierarchical"])
def test_extended_table_equals_the_scheme(method: Any) -> None:
    num_positions = 2 * tiny.TRAINED_LENGTH
    model = tiny.model("gpt2", {"type": "learned", "max_positions": num_positions, "extend": method})
    longer: Any = GPT2LMHeadModel(tiny.config("gpt2", n_positions=num_positions)).double().eval()
    state = {**model.state_dict()}
    table = state["transformer.wpe.weight"]
    state["transformer.wpe.weight"] = extended_rows(table, torch.arange(num_positions), method, num_positions)
    longer.load_state_dict(state)
    ids = tiny.tokens(1, num_positions)
    torch.testing.assert_close(compute_logits(longer, ids), compute_logits(model, ids))
