"""`hf-posenc export` and `convert --stock`, and what travels along with the weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, GenerationConfig, LlamaForCausalLM
from typer.testing import CliRunner

import hf_posenc
from hf_posenc.cli import app
from tests.checkpoints.stock_checkpoints import save_stock, update_json
from tests.support import exports
from tests.support import tiny_models as tiny
from tests.support import word_level_tokenizer as word_level
from tests.support.exports import EQUAL

THETA = json.dumps(exports.rope(theta=500.0))
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def run(*arguments: Any) -> Any:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def save_with_companions(directory: Path, architecture: str, scheme: Any) -> None:
    """A variant with a tokenizer, a chat template and generation settings."""
    model = exports.build(architecture, scheme)
    model.generation_config = GenerationConfig(max_new_tokens=7, do_sample=True, top_k=3)
    model.save_pretrained(directory)
    tokenizer = word_level.tokenizer()
    tokenizer.chat_template, tokenizer.model_max_length = TEMPLATE, 48
    tokenizer.save_pretrained(directory)


@pytest.mark.parametrize(
    ("architecture", "scheme", "target"),
    [("gpt2", "rope", "gpt_neox"), pytest.param("gpt2", "sinusoidal", "gpt2", marks=pytest.mark.slow)],
)
def test_tokenizer_template_and_generation_config_travel(
    architecture: str, scheme: Any, target: str, tmp_path: Path
) -> None:
    save_with_companions(tmp_path / "variant", architecture, scheme)
    text = tmp_path / "sample.txt"
    text.write_text(word_level.text(100))
    arguments = ("--out", tmp_path / "stock", "--text", text, "--max-positions", 96, "--json")
    result = run("export", tmp_path / "variant", *arguments)
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["model_type"] == target
    assert report["verification"]["num_tokens"] >= 100
    tokenizer, original = (AutoTokenizer.from_pretrained(tmp_path / name) for name in ("stock", "variant"))
    messages = [{"role": "user", "content": "w7 w9"}]
    assert tokenizer("w7 w9 w30")["input_ids"] == original("w7 w9 w30")["input_ids"]
    assert tokenizer.apply_chat_template(messages, tokenize=False) == "w7 w9"
    assert (original.model_max_length, tokenizer.model_max_length) == (48, 96)
    generation = GenerationConfig.from_pretrained(tmp_path / "stock")
    assert (generation.max_new_tokens, generation.do_sample, generation.top_k) == (7, True, 3)


@pytest.mark.slow
def test_tokenizers_are_not_chosen_by_model_type(tmp_path: Path) -> None:
    """Without a class in tokenizer_config.json, transformers would take RoFormer's."""
    exports.save(tmp_path / "variant", "bert", "rope")
    word_level.tokenizer(encoder=True).save_pretrained(tmp_path / "variant")
    update_json(tmp_path / "variant" / "tokenizer_config.json", tokenizer_class=None)
    export = hf_posenc.export_checkpoint(tmp_path / "variant", tmp_path / "stock")
    assert export.model_type == "roformer"
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "stock")
    assert tokenizer("w7 w9")["input_ids"] == [1, 7, 9, 2]
    assert "RoFormer" not in type(tokenizer).__name__


@pytest.mark.slow
def test_refusals_exit_with_2(tmp_path: Path) -> None:
    exports.save(tmp_path / "variant", "llama", "alibi")
    result = run("export", tmp_path / "variant", "--out", tmp_path / "stock")
    assert result.exit_code == 2
    assert "can be exported" in result.output
    assert not (tmp_path / "stock").exists()


def test_convert_tells_when_a_stock_config_would_do(tmp_path: Path) -> None:
    source = save_stock(tmp_path / "source", "llama")
    result = run("convert", source, "--scheme", THETA, "--out", tmp_path / "variant")
    assert '"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}' in result.output
    assert "--stock" in result.output
    for scheme in ("alibi", exports.rope(layers=[0]), exports.rope(layout="interleaved")):
        conversion = hf_posenc.convert_checkpoint(source, scheme, tmp_path / "other", force=True)
        assert conversion.stock_rope_parameters is None
        assert "--stock" not in str(conversion)
    rope_parameters = hf_posenc.convert_checkpoint(source, "rope", tmp_path / "own").stock_rope_parameters
    assert rope_parameters == {"rope_type": "default", "rope_theta": 10000.0}


def test_convert_tells_so_before_it_writes_anything(tmp_path: Path) -> None:
    source, told = save_stock(tmp_path / "source", "llama"), []
    result = run("convert", source, "--scheme", THETA, "--out", tmp_path / "variant", "--json")
    assert '"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}' in result.stderr
    assert json.loads(result.stdout)["stock_rope_parameters"]["rope_theta"] == 500.0

    def notify(text: str) -> None:
        told.append(text)
        assert [path.name for path in tmp_path.iterdir() if "other" in path.name] == []

    hf_posenc.convert_checkpoint(source, json.loads(THETA), tmp_path / "other", notify=notify)
    assert "--stock" in told[0]
    assert "rope_parameters" not in run("convert", source, "--scheme", "alibi", "--out", tmp_path / "alibi").stderr
    stock = run("convert", source, "--scheme", THETA, "--out", tmp_path / "stock", "--stock")
    assert "rope_parameters" not in stock.stderr


def test_convert_to_stock(tmp_path: Path) -> None:
    source = save_stock(tmp_path / "source", "llama")
    result = run("convert", source, "--scheme", THETA, "--out", tmp_path / "a" / "stock", "--stock")
    assert result.exit_code == 0, result.output
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == ["stock"]
    config = json.loads((tmp_path / "a" / "stock" / "config.json").read_text())
    assert (config["model_type"], config["rope_parameters"]["rope_theta"]) == ("llama", 500.0)
    stock = LlamaForCausalLM.from_pretrained(tmp_path / "a" / "stock").eval()
    expected = LlamaForCausalLM.from_pretrained(source, position_scheme=json.loads(THETA)).eval()
    ids = tiny.tokens(2, 20)
    with torch.no_grad():
        torch.testing.assert_close(stock(ids).logits, expected(ids).logits, **EQUAL)


@pytest.mark.slow
def test_a_conversion_without_a_stock_form_leaves_nothing_behind(tmp_path: Path) -> None:
    source = save_stock(tmp_path / "source", "llama")
    result = run("convert", source, "--scheme", "alibi", "--out", tmp_path / "a" / "stock", "--stock")
    assert result.exit_code == 2
    assert "No stock model" in result.output
    assert [path.name for path in tmp_path.iterdir()] == ["source"]
