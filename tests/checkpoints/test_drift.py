"""`convert --drift-text` measures how far a variant's outputs are from the source's."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from typer.testing import CliRunner

import hf_posenc
from hf_posenc.checkpoints import drift
from hf_posenc.cli import app
from tests.support import tiny_models as tiny
from tests.support.tensor_sizes import LargestTensor


def save_tokenizer(directory: Path) -> None:
    words = {f"w{number}": number for number in range(tiny.VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w0").save_pretrained(directory)


@pytest.mark.parametrize("architecture", ["gpt2", "llama", "bert"])
def test_drift(architecture: str, tmp_path: Path) -> None:
    stock = tiny.model(architecture, dtype=torch.float32)
    stock.save_pretrained(tmp_path / "stock")
    save_tokenizer(tmp_path / "stock")
    ids = tiny.tokens(3, tiny.TRAINED_LENGTH)
    text = tmp_path / "text"
    text.write_text(" ".join(f"w{token}" for token in ids.flatten().tolist()))
    stock_scheme = "rope" if architecture == "llama" else "learned"
    unchanged = hf_posenc.convert_checkpoint(tmp_path / "stock", stock_scheme, tmp_path / "same", drift_text=text).drift
    assert unchanged is not None
    assert unchanged.num_tokens == ids.numel()
    assert (round(unchanged.hidden_state_cosine, 5), unchanged.kl_divergence) == (1, 0)
    conversion = hf_posenc.convert_checkpoint(tmp_path / "stock", "none", tmp_path / "changed", drift_text=text)
    changed_drift = conversion.drift
    assert changed_drift is not None
    assert changed_drift.hidden_state_cosine < 0.99
    assert "drift" in str(conversion)
    if architecture == "bert":
        assert changed_drift.perplexity_before is None
        return
    changed = AutoModelForCausalLM.from_pretrained(tmp_path / "changed")
    with torch.no_grad():
        before, after = (model(ids, labels=ids).loss.exp().item() for model in (stock, changed))
    assert changed_drift.perplexity_before == pytest.approx(before, rel=1e-4)
    assert changed_drift.perplexity_after == pytest.approx(after, rel=1e-4)


def test_models_are_loaded_one_after_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    alive: list[weakref.ref[Any]] = []
    load_model = drift.load_model

    def load_and_count(*args: Any, **kwargs: Any) -> Any:
        gc.collect()
        assert not any(reference() is not None for reference in alive)
        result = load_model(*args, **kwargs)
        alive.append(weakref.ref(result[0]))
        return result

    monkeypatch.setattr(drift, "load_model", load_and_count)
    tiny.model("gpt2", dtype=torch.float32).save_pretrained(tmp_path / "stock")
    save_tokenizer(tmp_path / "stock")
    (tmp_path / "text").write_text(" ".join(f"w{token}" for token in range(tiny.VOCABULARY)))
    hf_posenc.convert_checkpoint(tmp_path / "stock", "rope", tmp_path / "out", drift_text=tmp_path / "text")
    assert len(alive) == 2
    progress = capsys.readouterr().err
    assert "Running the source" in progress
    assert "Running the variant" in progress


def test_failed_measurement_leaves_no_output(tmp_path: Path) -> None:
    tiny.model("gpt2", dtype=torch.float32).save_pretrained(tmp_path / "stock")
    command = ["convert", str(tmp_path / "stock"), "--scheme", "rope", "--out", str(tmp_path / "out")]
    result = CliRunner().invoke(app, [*command, "--drift-text", str(tmp_path / "missing.txt")])
    assert result.exit_code == 2
    assert not (tmp_path / "out").exists()


def test_logits_exist_for_a_few_tokens_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny.model("llama", dtype=torch.float32).save_pretrained(tmp_path / "stock")
    save_tokenizer(tmp_path / "stock")
    text = tmp_path / "text"
    text.write_text(" ".join(f"w{token}" for token in range(tiny.TRAINED_LENGTH)))
    hf_posenc.convert_checkpoint(tmp_path / "stock", "t5", tmp_path / "out")

    def num_logits(tensor: torch.Tensor) -> int:
        return tensor.numel() if tensor.ndim == 3 and tensor.shape[-1] == tiny.VOCABULARY else 0

    drifts = []
    for chunk in (4, tiny.TRAINED_LENGTH):  # the second is a control: all at once
        monkeypatch.setattr(drift, "TOKENS_PER_CHUNK", chunk)
        with LargestTensor(num_logits) as largest:
            drifts.append(drift.measure_drift(tmp_path / "stock", tmp_path / "out", text))
        assert largest.numbers == 2 * chunk * tiny.VOCABULARY
    assert drifts[0].perplexity_after == pytest.approx(drifts[1].perplexity_after, rel=1e-5)
    assert drifts[0].kl_divergence == pytest.approx(drifts[1].kl_divergence, rel=1e-4)
