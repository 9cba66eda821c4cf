"""`convert --warm-start`: a converted checkpoint starts from the attention of its source."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

import hf_posenc
from hf_posenc.cli import app
from hf_posenc.errors import PosEncError
from hf_posenc.training import ClosedFormStart, closed_form_start
from tests.support import tiny_models as tiny

PER_LAYER = {"type": "t5", "shared": False}


def test_warm_start_equals_closed_form_start(stock: dict[str, Path], text: Path, tmp_path: Path) -> None:
    before = {path.name: path.read_bytes() for path in stock["llama"].iterdir()}
    plain = hf_posenc.convert_checkpoint(stock["llama"], PER_LAYER, tmp_path / "plain", drift_text=text)
    command = ["convert", str(stock["llama"]), "--scheme", '{"type": "t5", "shared": false}']
    result = CliRunner().invoke(app, [*command, "--out", str(tmp_path / "started"), "--warm-start", str(text)])
    assert result.exit_code == 0, result.output
    assert "started from the attention" in result.output
    assert {path.name: path.read_bytes() for path in stock["llama"].iterdir()} == before, "the source is left alone"
    started, swapped = (AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in ("started", "plain"))
    stock_model = AutoModelForCausalLM.from_pretrained(stock["llama"])
    rows = torch.tensor([int(word[1:]) for word in text.read_text().split()])[: 12 * tiny.TRAINED_LENGTH]
    rows = rows.view(12, tiny.TRAINED_LENGTH)
    closed_form_start(stock_model, swapped, rows)
    with torch.no_grad():
        torch.testing.assert_close(started(rows).logits, swapped(rows).logits)
    assert plain.warm_started is False
    assert set(load_weights(tmp_path / "started")) == set(load_weights(tmp_path / "plain"))


def load_weights(directory: Path) -> dict[str, torch.Tensor]:
    return {name: weight for path in directory.glob("*.safetensors") for name, weight in load_file(path).items()}


def test_dtype_and_drift(stock: dict[str, Path], text: Path, tmp_path: Path) -> None:
    half = tmp_path / "half"
    AutoModelForCausalLM.from_pretrained(stock["llama"]).to(torch.bfloat16).save_pretrained(half)
    for path in stock["llama"].glob("tokenizer*"):
        (half / path.name).write_bytes(path.read_bytes())
    options = {"drift_text": text}
    plain = hf_posenc.convert_checkpoint(half, PER_LAYER, tmp_path / "plain", **options)
    started = hf_posenc.convert_checkpoint(
        half, PER_LAYER, tmp_path / "started", warm_start=ClosedFormStart(text), **options
    )
    assert plain.drift is not None
    assert started.drift is not None
    assert started.drift.kl_divergence < plain.drift.kl_divergence
    assert {weight.dtype for weight in load_weights(tmp_path / "started").values()} == {torch.bfloat16}


def test_scheme_without_biases_is_left_as_it_is(stock: dict[str, Path], text: Path, tmp_path: Path) -> None:
    scheme = {"type": "rope", "theta": 500.0}
    hf_posenc.convert_checkpoint(stock["llama"], scheme, tmp_path / "out", warm_start=ClosedFormStart(text))
    source, variant = load_weights(stock["llama"]), load_weights(tmp_path / "out")
    assert all(torch.equal(source[name], variant[name]) for name in source)


def test_too_little_text(stock: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("w7 w8")
    start = ClosedFormStart(tmp_path / "short.txt")
    with pytest.raises(PosEncError, match="too short for a warm start"):
        hf_posenc.convert_checkpoint(stock["llama"], "t5", tmp_path / "out", warm_start=start)
    assert not (tmp_path / "out").exists()
