"""The commands on every model family: each family once per tool in the slow tests, a sample in the fast ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import Result
from typer.testing import CliRunner

import hf_posenc
from hf_posenc.cli import app
from hf_posenc.patches import max_positions
from tests.support import families
from tests.support import tiny_models as tiny
from tests.support import word_level_tokenizer as word_level
from tests.support.evaluation import evaluated_model
from tests.support.hub_client import Client, seen
from tests.support.hub_server import Hub

TOOL_FAMILIES = [
    "mistral",
    "gemma3_text",
    "gpt_neox",
    "opt",
    "mixtral",
    "roberta",
    "distilbert",
    "albert",
    "modernbert",
]
SCHEME = {"type": "t5", "init": "paper", "shared": False}


def by_family(fast: list[str], model_types: list[str]) -> pytest.MarkDecorator:
    marks = {name: () if name in fast else (pytest.mark.slow,) for name in model_types}
    return pytest.mark.parametrize("model_type", [pytest.param(name, marks=marks[name]) for name in model_types])


def save_stock(model_type: str, directory: Path) -> Path:
    """A stock checkpoint with its tokenizer in stock/, and text.txt."""
    model = families.model(model_type, auto=families.auto_class(model_type))
    model.save_pretrained(directory / "stock")
    word_level.tokenizer(encoder=not families.is_causal(model_type)).save_pretrained(directory / "stock")
    (directory / "text.txt").write_text(word_level.text(1500))
    return directory / "stock"


def run(*arguments: object) -> Result:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == 0, result.output
    return result


def load(model_type: str, directory: Path, **options: Any) -> Any:
    model, info = families.auto_class(model_type).from_pretrained(directory, output_loading_info=True, **options)
    assert not any(info.values()), info
    return model.eval()


@by_family(["opt", "mixtral"], families.MODEL_TYPES)
def test_converted_checkpoint_equals_from_pretrained(model_type: str, tmp_path: Path) -> None:
    stock, out = save_stock(model_type, tmp_path), tmp_path / "variant"
    run("convert", stock, "--scheme", json.dumps(SCHEME), "--out", out)
    converted, direct = load(model_type, out), load(model_type, stock, position_scheme=SCHEME)
    weights = converted.state_dict()
    assert weights.keys() == direct.state_dict().keys()
    for name, weight in direct.state_dict().items():
        assert torch.equal(weights[name], weight) or "position_scheme" in name, name
    direct.load_state_dict(weights)
    ids = tiny.tokens()
    logits = families.output(converted, ids)
    assert torch.equal(logits, families.output(direct, ids))
    assert families.differ(logits, families.output(load(model_type, stock), ids))
    for directory in (stock, out):
        inspection = hf_posenc.inspect_checkpoint(directory)
        assert not inspection.problems
        assert not inspection.warnings
    num_added = sum(weight.numel() for name, weight in weights.items() if "position_scheme" in name)
    assert inspection.num_scheme_parameters == num_added > 0


@by_family(["distilbert", "cohere"], [name for name in families.MODEL_TYPES if name not in families.QWEN_VL])
def test_evaluation_sees_the_logits_of_the_model(model_type: str) -> None:
    """Heads normalize, scale or cap what they compute."""
    model, causal = families.model(model_type, auto=families.auto_class(model_type)), families.is_causal(model_type)
    ids = tiny.tokens(2, 14)
    scored = torch.ones_like(ids, dtype=torch.bool)
    scored[:, 0] = not causal
    log_probs = torch.cat(list(evaluated_model(model, ids.flatten(), causal=causal).log_probs(ids, scored)))
    with torch.no_grad():
        logits = model(ids).logits
    expected = (logits[:, :-1] if causal else logits).flatten(0, 1).float().log_softmax(-1)
    torch.testing.assert_close(log_probs, expected, rtol=0, atol=1e-4)
    assert families.differ(log_probs, expected.flip(0))


@by_family(["roberta"], TOOL_FAMILIES)
def test_eval_counts_from_the_trained_length(model_type: str, tmp_path: Path) -> None:
    stock, out = save_stock(model_type, tmp_path), tmp_path / "variant"
    hf_posenc.convert_checkpoint(stock, "alibi", out)
    options = ["--data", tmp_path / "text.txt", "--lengths", "1x,2x", "--max-tokens", "300", "--no-progress", "--json"]
    report = json.loads(run("eval", stock, out, *options).stdout)
    length = max_positions(families.config(model_type))
    assert report["trained_length"] == length
    stopped = [
        (result["model"], result["stopped"]["max_length"]) for result in report["perplexity"] if result["stopped"]
    ]
    assert stopped == ([("stock", length)] if "table" in families.traits(model_type) else [])


@by_family(["opt"], TOOL_FAMILIES)
def test_training_run(model_type: str, tmp_path: Path) -> None:
    stock, out, text = save_stock(model_type, tmp_path), tmp_path / "run", tmp_path / "text.txt"
    options = ["--max-steps", "2", "--per-device-train-batch-size", "2", "--use-cpu", "--report-to", "none"]
    run(
        "train",
        "--model",
        stock,
        "--scheme",
        "t5",
        "--data",
        text,
        "--train-length",
        "16",
        "--output-dir",
        out,
        *options,
    )
    assert load(model_type, out).config.position_scheme == "t5"
    assert json.loads(run("inspect", out, "--json").stdout)["intact"]


@by_family([], TOOL_FAMILIES)
def test_push_and_pull(model_type: str, hub: Hub, owner: Client, other: Client, tmp_path: Path) -> None:
    stock, out, auto_class = save_stock(model_type, tmp_path), tmp_path / "variant", families.auto_class(model_type)
    hf_posenc.convert_checkpoint(stock, SCHEME, out)
    owner.push(out, "me/variant")
    card = hub.files("me/variant")["README.md"].decode()
    assert f"import {auto_class.__name__}" in card
    assert f"pipeline_tag: {'text-generation' if families.is_causal(model_type) else 'fill-mask'}" in card
    pulled, expected = other.pull("me/variant", auto_class=auto_class.__name__), seen(load(model_type, out))
    assert {name: pulled[name] for name in expected} == expected


@by_family(["albert"], TOOL_FAMILIES)
def test_plot(model_type: str, tmp_path: Path) -> None:
    stock = save_stock(model_type, tmp_path)
    options = ["--model", stock, "--scheme", "t5", "--data", tmp_path / "text.txt", "--out", tmp_path / "figure.png"]
    results = json.loads(run("plot", "attention-by-distance", *options, "--json").stdout)["results"]
    assert len(results) == 2
