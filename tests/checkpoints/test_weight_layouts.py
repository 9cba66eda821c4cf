"""Weights in another convention compute the same, and only together with the rotation that belongs to them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2LMHeadModel, LlamaForCausalLM, PreTrainedTokenizerFast
from typer.testing import CliRunner

import hf_posenc
from hf_posenc.checkpoints.drift import measure_drift
from hf_posenc.checkpoints.layout import extend_table, feature_order, reorder_rotary
from hf_posenc.cli import app
from tests.support import tiny_models as tiny

INTERLEAVED = {"type": "rope", "layout": "interleaved"}


def logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(ids).logits


@pytest.mark.parametrize("turned", [None, 4])
def test_orders_undo_each_other(turned: int | None) -> None:
    weight = torch.randn(24, 5)
    there = reorder_rotary(weight, "halves_to_interleaved", 8, turned)
    assert not torch.equal(there, weight)
    assert torch.equal(reorder_rotary(there, "interleaved_to_halves", 8, turned), weight)
    assert feature_order("interleaved_to_halves", 6) == [0, 2, 4, 1, 3, 5]
    with pytest.raises(ValueError, match="pairs"):
        feature_order("interleaved_to_halves", 7)
    with pytest.raises(ValueError, match="unknown change"):
        feature_order("backwards", 8)  # type: ignore[arg-type]


@pytest.mark.parametrize("shard", ["20KB", "5GB"])
def test_llama_in_the_other_convention_computes_the_same(shard: str, tmp_path: Path) -> None:
    stock = tiny.model("llama", dtype=torch.float32, attention_bias=True)
    stock.save_pretrained(tmp_path / "stock", max_shard_size=shard)
    ids = tiny.tokens()
    convert = hf_posenc.convert_checkpoint
    done = convert(tmp_path / "stock", INTERLEAVED, tmp_path / "new", rotary_weights="halves_to_interleaved")
    assert done.rewritten
    new = AutoModelForCausalLM.from_pretrained(tmp_path / "new")
    torch.testing.assert_close(logits(new, ids), logits(stock, ids), rtol=0, atol=1e-5)
    convert(tmp_path / "stock", INTERLEAVED, tmp_path / "wrong")
    wrong = AutoModelForCausalLM.from_pretrained(tmp_path / "wrong")
    assert (logits(wrong, ids) - logits(stock, ids)).abs().max() > 1e-2
    for name, parameter in stock.named_parameters():
        moved = name.endswith(("q_proj.weight", "k_proj.weight", "q_proj.bias", "k_proj.bias"))
        assert torch.equal(new.get_parameter(name), parameter) is not moved, name
        if moved:
            size = tiny.WIDTH // tiny.HEADS
            assert torch.equal(reorder_rotary(new.get_parameter(name), "interleaved_to_halves", size), parameter)


def test_weights_of_the_other_convention_become_those_of_transformers(tmp_path: Path) -> None:
    stock = tiny.model("llama", dtype=torch.float32)
    other: Any = LlamaForCausalLM(stock.config)
    state = {
        name: reorder_rotary(tensor, "halves_to_interleaved", tiny.WIDTH // tiny.HEADS)
        if name.endswith(("q_proj.weight", "k_proj.weight"))
        else tensor
        for name, tensor in stock.state_dict().items()
    }
    other.load_state_dict(state)
    other.save_pretrained(tmp_path / "meta")
    hf_posenc.convert_checkpoint(tmp_path / "meta", "rope", tmp_path / "out", rotary_weights="interleaved_to_halves")
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert torch.equal(logits(found, tiny.tokens()), logits(stock, tiny.tokens()))


def test_models_without_a_rotation_have_no_such_order(tmp_path: Path) -> None:
    tiny.model("gpt2", dtype=torch.float32).save_pretrained(tmp_path / "stock")
    with pytest.raises(ValueError, match="has none"):
        hf_posenc.convert_checkpoint(
            tmp_path / "stock", "rope", tmp_path / "out", rotary_weights="interleaved_to_halves"
        )
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("how", ["interpolate", "tile", "hierarchical"])
def test_a_longer_table_is_what_the_scheme_computes(how: Any) -> None:
    rows = 2 * tiny.TRAINED_LENGTH
    model = tiny.model("gpt2", {"type": "learned", "max_positions": rows, "extend": how})
    longer: Any = GPT2LMHeadModel(tiny.config("gpt2", n_positions=rows)).double().eval()
    state = {**model.state_dict()}
    state["transformer.wpe.weight"] = extend_table(state["transformer.wpe.weight"], rows, how)
    longer.load_state_dict(state)
    ids = tiny.tokens(1, rows)
    torch.testing.assert_close(logits(longer, ids), logits(model, ids))
    with pytest.raises(ValueError, match="cannot be extended"):
        extend_table(torch.zeros(4, 2), 3, how)


def with_tokenizer(directory: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {f"w{number}": number for number in range(tiny.VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w0").save_pretrained(directory)


@pytest.mark.parametrize("architecture", ["gpt2", "llama", "bert"])
def test_drift_is_measured_where_asked(architecture: str, tmp_path: Path) -> None:
    stock = tiny.model(architecture, dtype=torch.float32)
    stock.save_pretrained(tmp_path / "stock")
    with_tokenizer(tmp_path / "stock")
    ids = tiny.tokens(3, tiny.TRAINED_LENGTH)
    (tmp_path / "text").write_text(" ".join(f"w{token}" for token in ids.flatten().tolist()))
    own = "rope" if architecture == "llama" else "learned"
    convert = hf_posenc.convert_checkpoint
    none = convert(tmp_path / "stock", own, tmp_path / "same", measure=tmp_path / "text").drift
    assert none is not None
    assert (none.tokens, round(none.cosine, 5), none.divergence) == (ids.numel(), 1, 0)
    done = convert(tmp_path / "stock", "none", tmp_path / "changed", measure=tmp_path / "text")
    assert done.drift is not None
    assert done.drift.cosine < 0.99
    assert "drift from the source" in str(done)
    if architecture != "bert":
        with torch.no_grad():
            expected = stock(ids, labels=ids).loss.exp().item()
        assert done.drift.perplexity_before == pytest.approx(expected, rel=1e-4)
        with torch.no_grad():
            changed = AutoModelForCausalLM.from_pretrained(tmp_path / "changed")(ids, labels=ids).loss.exp().item()
        assert done.drift.perplexity_after == pytest.approx(changed, rel=1e-4)
    else:
        assert done.drift.perplexity_before is None


def test_drift_that_cannot_be_measured_leaves_nothing(tmp_path: Path) -> None:
    tiny.model("gpt2", dtype=torch.float32).save_pretrained(tmp_path / "stock")
    command = ["convert", str(tmp_path / "stock"), "--scheme", "rope", "--out", str(tmp_path / "out")]
    result = CliRunner().invoke(app, [*command, "--measure", str(tmp_path / "missing.txt")])
    assert result.exit_code == 2
    assert not (tmp_path / "out").exists()
    with pytest.raises(ValueError, match="no tokens"):
        measure_drift(torch.nn.Identity(), torch.nn.Identity(), [], causal=True)
