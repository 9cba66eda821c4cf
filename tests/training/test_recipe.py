"""What a recipe does in a run: warm start, teacher, fading hidden-state loss, stages."""

from __future__ import annotations

import dataclasses
import itertools
import json
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModel

from hf_posenc.checkpoints import RECOVERY_FILE
from hf_posenc.errors import PosEncError
from hf_posenc.training import RecoveryTrainer, Teacher, train
from hf_posenc.training.data import sample_input_ids
from hf_posenc.training.recipes import DEFAULT_FIT_RATIO, NAIVE, RECOMMENDED, resolve_fit_ratio
from tests.support import tiny_models as tiny
from tests.support import word_level_tokenizer as word_level
from tests.support.sampling import some
from tests.support.training_runs import losses_in, request, settings


@some("architecture", ["bert", "gpt2", "llama"], fast=["llama"])
def test_recommended_recipe_is_the_default(
    stock: dict[str, Path], text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, architecture: str
) -> None:
    """Biases are matched, attention is fitted for an old or a new rotation, BERT keeps the mean of its table."""
    seen: list[Any] = []
    original_init = RecoveryTrainer.__init__

    def spy(self: Any, *args: Any, **kwargs: Any) -> None:
        seen.append((kwargs, {name: w.detach().clone() for name, w in kwargs["model"].named_parameters()}))
        original_init(self, *args, **kwargs)

    monkeypatch.setattr(RecoveryTrainer, "__init__", spy)
    train(request(stock[architecture], text), settings(tmp_path / "a", max_steps=2))
    train(request(stock[architecture], text, recipe=NAIVE), settings(tmp_path / "b", max_steps=2))
    if architecture == "bert":
        train(request(stock[architecture], text, scheme="rope"), settings(tmp_path / "c", max_steps=2))
        (_, with_rope), (_, unfitted) = seen.pop(), seen[-1]
        assert any(not torch.equal(with_rope[name], unfitted[name]) for name in with_rope if "query" in name)
    (options, weights), (naive_options, naive_weights) = seen
    assert isinstance(options["teacher"], Teacher)
    assert options["hidden_loss_until"] == RECOMMENDED.hidden_loss_until
    rates = [kwargs["position_learning_rate"] / kwargs["args"].learning_rate for kwargs in (options, naive_options)]
    assert rates == [RECOMMENDED.position_lr_multiplier, 1.0]
    assert naive_options["teacher"] is None
    changed = {name for name in weights if not torch.equal(weights[name], naive_weights[name])}
    assert any("position_scheme" in name for name in changed)
    assert ("bert.embeddings.token_type_embeddings.weight" in changed) == (architecture == "bert")
    reordered = {"bert": "query.weight", "gpt2": "c_attn.weight", "llama": "q_proj.weight"}
    assert any(name.endswith(reordered[architecture]) for name in changed)
    assert not any("mlp" in name or "intermediate" in name for name in changed)


@pytest.mark.slow
def test_extended_table_needs_no_warm_start(stock: dict[str, Path], text: Path, tmp_path: Path) -> None:
    scheme = {"type": "learned", "max_positions": 2 * tiny.TRAINED_LENGTH, "extend": "interpolate"}
    out = train(request(stock["gpt2"], text, scheme=scheme), settings(tmp_path / "out"))
    assert json.loads((out / "config.json").read_text())["position_scheme"] == scheme


@pytest.mark.slow
def test_hidden_loss_fades_to_zero(stock: dict[str, Path], text: Path, tmp_path: Path) -> None:
    """With a learning rate of 0, the loss term changes by its scale only."""
    recipe = dataclasses.replace(RECOMMENDED, hidden_loss_until=0.5)
    arguments = settings(
        tmp_path / "out", logging_steps=1, max_steps=8, learning_rate=0.0, save_steps=8, per_device_train_batch_size=64
    )
    out = train(request(stock["gpt2"], text, recipe=recipe), arguments)
    history = json.loads((out / "checkpoint-8" / "trainer_state.json").read_text())["log_history"]
    losses = [entry.get("hidden_loss", 0.0) for entry in history if "kl_loss" in entry]
    assert losses[4:] == [0.0] * 4
    assert [value / losses[0] for value in losses[:4]] == pytest.approx([1, 0.75, 0.5, 0.25], rel=0.1)


@pytest.mark.slow
def test_stages_change_the_row_length(
    stock: dict[str, Path], text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths = []
    stock_loss = RecoveryTrainer.compute_loss

    def spy(self: Any, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        lengths.append(inputs["input_ids"].shape[-1])
        return stock_loss(self, model, inputs, *args, **kwargs)

    monkeypatch.setattr(RecoveryTrainer, "compute_loss", spy)
    # The last stage is longer than the teacher can read at once: it reads windows.
    stages = f"8:2,16:2,{tiny.TRAINED_LENGTH + 8}:2"
    train(request(stock["gpt2"], text, train_length=stages), settings(tmp_path / "out"))
    assert lengths == [8, 8, 16, 16, 56, 56]
    lengths.clear()
    train(request(stock["gpt2"], text, train_length="8:1,16:1"), settings(tmp_path / "again", max_steps=-1))
    assert lengths == [8, 16], "the stages determine the number of steps"


@pytest.mark.slow
def test_headless_encoder_learns_hidden_states(stock: dict[str, Path], text: Path, tmp_path: Path) -> None:
    headless = tmp_path / "headless"
    AutoModel.from_pretrained(stock["bert"]).save_pretrained(headless)
    word_level.tokenizer(encoder=True).save_pretrained(headless)
    out = train(request(headless, text, eval_data=str(text)), settings(tmp_path / "out"))
    assert losses_in(out)[-1] < losses_in(out)[0]
    recovery = json.loads((out / RECOVERY_FILE).read_text())
    assert recovery["eval_cosine"] > recovery["swapped"]["eval_cosine"] > 0
    with pytest.raises(PosEncError, match="has no head"):
        train(request(headless, text, recipe=NAIVE), settings(tmp_path / "other"))


def test_default_fit_ratio() -> None:
    rotation, table = (types.SimpleNamespace(rotary=rotary) for rotary in (True, False))
    for scheme in ("alibi", "t5", "none", "rope", "deberta"):
        assert resolve_fit_ratio(RECOMMENDED, rotation, scheme) == DEFAULT_FIT_RATIO
    for scheme in ("rope", "shaw", ["t5", "rope"]):
        assert resolve_fit_ratio(RECOMMENDED, table, scheme) == DEFAULT_FIT_RATIO
    for scheme in ("t5", "sinusoidal", "none"):
        assert resolve_fit_ratio(RECOMMENDED, table, scheme) == 0.0
    assert resolve_fit_ratio(RECOMMENDED, table, ["learned", "rope"]) == 0.0, "the table is kept"
    assert resolve_fit_ratio(dataclasses.replace(RECOMMENDED, fit_ratio=0.3), table, "t5") == 0.3


def test_sampled_rows_have_one_length() -> None:
    """The requested length, or what half of the rows have."""
    rows = [{"input_ids": list(range(length))} for length in (3, 9, 8, 2, 5, 4)]
    assert sample_input_ids(rows, 2, 8).tolist() == [list(range(8))] * 2
    assert sample_input_ids(rows, 1, 8).shape == (1, 8)
    assert sample_input_ids(rows, 8, 16).tolist() == [list(range(5))] * 3
    assert sample_input_ids(rows, 8, 8).tolist() == [list(range(5))] * 3, "only two rows are long enough"
    endless = itertools.cycle(rows)
    assert sample_input_ids(endless, 2, 16).shape == (2, 8), "reads no more rows than needed"
    assert sample_input_ids([{"input_ids": [1]}], 2, 16) is None
    assert sample_input_ids([], 2, 16) is None
