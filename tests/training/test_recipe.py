"""What the recipe of a run does, and when: teacher, fit, handover, states, stages."""

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

from hf_posenc.checkpoints.file_names import RECOVERY_FILE
from hf_posenc.training.recipe import FIT_SHARE, NAIVE, RECOMMENDED, share_to_fit
from hf_posenc.training.recovering import RecoveryTrainer
from hf_posenc.training.run import train
from hf_posenc.training.student import some_rows
from hf_posenc.training.teacher import Teacher
from tests.support import tiny_models as tiny
from tests.support import word_level_tokenizer as word_level
from tests.support.training_fixtures import losses_in, request, settings


@pytest.mark.parametrize("architecture", ["bert", "gpt2", "llama"])
def test_the_recommended_recipe_is_what_there_is_without_words(
    stock: dict[str, Path], text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, architecture: str
) -> None:
    """Attention is fitted under an old rotation or a new one, BERT's table leaves its mean, then there is a teacher;
    plain fine-tuning has none of it."""
    seen: list[Any] = []
    built = RecoveryTrainer.__init__

    def spy(self: Any, *args: Any, **kwargs: Any) -> None:
        seen.append((kwargs, {name: w.detach().clone() for name, w in kwargs["model"].named_parameters()}))
        built(self, *args, **kwargs)

    monkeypatch.setattr(RecoveryTrainer, "__init__", spy)
    train(request(stock[architecture], text), settings(tmp_path / "a", max_steps=2))
    train(request(stock[architecture], text, recipe=NAIVE), settings(tmp_path / "b", max_steps=2))
    if architecture == "bert":
        train(request(stock[architecture], text, scheme="rope"), settings(tmp_path / "c", max_steps=2))
        (_, turning), (_, stayed) = seen.pop(), seen[-1]
        assert any(not torch.equal(turning[name], stayed[name]) for name in turning if "query" in name)
    (given, begun), (plainly, plain) = seen
    assert isinstance(given["teacher"], Teacher)
    assert given["states_until"] == RECOMMENDED.states_until
    rates = [kwargs["position_learning_rate"] / kwargs["args"].learning_rate for kwargs in (given, plainly)]
    assert rates == [RECOMMENDED.position_rate, 1.0]
    assert plainly["teacher"] is None
    changed = {name for name in begun if not torch.equal(begun[name], plain[name])}
    if architecture == "llama":
        assert any("position_scheme" in name for name in changed)
        assert any("q_proj" in name for name in changed)
    elif architecture == "gpt2":
        assert not changed
    else:
        assert changed == {"bert.embeddings.token_type_embeddings.weight"}


def test_a_stretched_table_is_trained_without_a_warm_up(stock: dict[str, Path], text: Path, tmp_path: Path) -> None:
    """Its rows are others from the first step on: there is no old encoding to warm up from."""
    scheme = {"type": "learned", "max_positions": 2 * tiny.TRAINED_LENGTH, "extend": "interpolate"}
    out = train(request(stock["gpt2"], text, scheme=scheme), settings(tmp_path / "out"))
    assert json.loads((out / "config.json").read_text())["position_scheme"] == scheme


def test_states_fade_evenly_and_then_count_no_more(stock: dict[str, Path], text: Path, tmp_path: Path) -> None:
    """At a rate of nothing, what is left of them in the loss is their share."""
    recipe = dataclasses.replace(RECOMMENDED, states_until=0.5)
    asked = settings(
        tmp_path / "out", logging_steps=1, max_steps=8, learning_rate=0.0, save_steps=8, per_device_train_batch_size=64
    )
    out = train(request(stock["gpt2"], text, recipe=recipe), asked)
    history = json.loads((out / "checkpoint-8" / "trainer_state.json").read_text())["log_history"]
    found = [entry.get("distance", 0.0) for entry in history if "divergence" in entry]
    assert found[4:] == [0.0] * 4
    assert [value / found[0] for value in found[:4]] == pytest.approx([1, 0.75, 0.5, 0.25], rel=0.1)


def test_stages_change_the_length_on_the_way(
    stock: dict[str, Path], text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths = []
    stock_loss = RecoveryTrainer.compute_loss

    def spy(self: Any, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        lengths.append(inputs["input_ids"].shape[-1])
        return stock_loss(self, model, inputs, *args, **kwargs)

    monkeypatch.setattr(RecoveryTrainer, "compute_loss", spy)
    # The last stage is longer than the teacher can follow: there the text is learnt from.
    stages = f"8:2,16:2,{tiny.TRAINED_LENGTH + 8}:2"
    train(request(stock["gpt2"], text, train_length=stages), settings(tmp_path / "out"))
    assert lengths == [8, 8, 16, 16, 56, 56]
    lengths.clear()
    train(request(stock["gpt2"], text, train_length="8:1,16:1"), settings(tmp_path / "again", max_steps=-1))
    assert lengths == [8, 16], "the steps of the stages are all there are"


def test_an_encoder_without_a_head_learns_the_states_of_its_teacher(
    stock: dict[str, Path], text: Path, tmp_path: Path
) -> None:
    headless = tmp_path / "headless"
    AutoModel.from_pretrained(stock["bert"]).save_pretrained(headless)
    word_level.tokenizer(encoder=True).save_pretrained(headless)
    out = train(request(headless, text, eval_data=str(text)), settings(tmp_path / "out"))
    assert losses_in(out)[-1] < losses_in(out)[0]
    assert set(json.loads((out / RECOVERY_FILE).read_text())) == {"eval_loss"}
    with pytest.raises(ValueError, match="has no head"):
        train(request(headless, text, recipe=NAIVE), settings(tmp_path / "other"))


def test_where_fitting_is_worth_it() -> None:
    rotation, table = (types.SimpleNamespace(rotary=rotary) for rotary in (True, False))
    for scheme in ("alibi", "t5", "none", "rope", "deberta"):
        assert share_to_fit(RECOMMENDED, rotation, scheme) == FIT_SHARE
    for scheme, share in (("rope", FIT_SHARE), ("shaw", FIT_SHARE), ("t5", 0.0), ("sinusoidal", 0.0), ("none", 0.0)):
        assert share_to_fit(RECOMMENDED, table, scheme) == share
    assert share_to_fit(RECOMMENDED, table, ["learned", "rope"]) == 0.0, "the table is there still"
    assert share_to_fit(RECOMMENDED, table, ["t5", "rope"]) == FIT_SHARE
    assert share_to_fit(dataclasses.replace(RECOMMENDED, fit=0.3), table, "t5") == 0.3


def test_rows_to_fit_on() -> None:
    """As long as is asked for, or else as the longer half of them."""
    rows = [{"input_ids": list(range(length))} for length in (3, 9, 8, 2, 5, 4)]
    assert some_rows(rows, 2, 8).tolist() == [list(range(8))] * 2
    assert some_rows(rows, 1, 8).shape == (1, 8)
    assert some_rows(rows, 8, 16).tolist() == [list(range(5))] * 3
    assert some_rows(rows, 8, 8).tolist() == [list(range(5))] * 3, "two that are long enough are too few"
    endless = itertools.cycle(rows)
    assert some_rows(endless, 2, 16).shape == (2, 8), "no more of them are looked at than it takes"
    assert some_rows([{"input_ids": [1]}], 2, 16) is None
    assert some_rows([], 2, 16) is None
