"""Training runs: from a stock checkpoint and text to a variant."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM

from hf_posenc.checkpoints import RECOVERY_FILE
from hf_posenc.errors import PosEncError
from hf_posenc.training import LossWeights, Recipe, RecoveryTrainer, Teacher, train
from hf_posenc.training.recipes import NAIVE
from tests.support import word_level_tokenizer as word_level
from tests.support.sampling import some
from tests.support.training_runs import LENGTH, files_in, losses_in, request, settings, weights


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["bert", "gpt2"])
def test_original_is_evaluated_on_the_same_text(
    architecture: str, stock: dict[str, Path], text: Path, tmp_path: Path
) -> None:
    """With the stock model's own scheme and a learning rate of 0, both are the same model."""
    options = {"scheme": "learned", "eval_data": str(text)}
    out = train(
        request(stock[architecture], text, **options), settings(tmp_path / "out", learning_rate=0.0, max_steps=1)
    )
    recovery = json.loads((out / RECOVERY_FILE).read_text())
    assert recovery["original"]["eval_loss"] == pytest.approx(recovery["eval_loss"], rel=1e-6)
    assert recovery["original"]["eval_perplexity"] == pytest.approx(recovery["eval_perplexity"], rel=1e-5)


ROOM_TO_LEARN = Recipe(reorder_heads=False, fold_rotation=False, match_biases=False, fit_ratio=0.0)
"""Without a warm start, a few steps lower the loss of any model."""


@pytest.mark.parametrize("architecture", ["gpt2", pytest.param("llama", marks=pytest.mark.slow)])
def test_causal_model(architecture: str, stock: dict[str, Path], text: Path, tmp_path: Path) -> None:
    options = {"eval_data": str(text), "recipe": ROOM_TO_LEARN}
    out = train(request(stock[architecture], text, **options), settings(tmp_path / "out"))
    losses = losses_in(out)
    assert losses[-1] < losses[0]
    model = AutoModelForCausalLM.from_pretrained(out)
    assert model.config.position_scheme == "t5"
    assert model.config.use_cache, "as it was, although it is off while the model is trained"
    recovery = json.loads((out / RECOVERY_FILE).read_text())
    assert recovery["eval_perplexity"] > 1
    assert recovery["original"]["eval_perplexity"] != recovery["eval_perplexity"]
    pickles = {name for name in files_in(out) if name.endswith((".bin", ".pt", ".pth", ".pkl"))}
    assert not pickles
    assert {path.name for path in out.glob("checkpoint-*")} == {"checkpoint-2", "checkpoint-4", "checkpoint-6"}


@pytest.mark.parametrize("packing", [pytest.param(None, marks=pytest.mark.slow), True])
def test_masked_model(packing: bool | None, stock: dict[str, Path], text: Path, tmp_path: Path) -> None:
    out = train(request(stock["bert"], text, packing=packing), settings(tmp_path / "out"))
    assert losses_in(out)[-1] < losses_in(out)[0]
    assert type(AutoModelForMaskedLM.from_pretrained(out)).__name__ == "PosEncBertForMaskedLM"


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["bert", "gpt2"])
def test_classification_labels_come_from_the_data(architecture: str, stock: dict[str, Path], tmp_path: Path) -> None:
    """The stock model has no head for them, so the default recipe learns from the labels."""
    names = ["bad", "fair", "good"]
    rows = [{"text": f"{word_level.text(6, seed)} w{10 + seed % 3}", "label": names[seed % 3]} for seed in range(96)]
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = {"task": "classification", "eval_data": str(data), "eval_split": "train"}
    out = train(
        request(stock[architecture], data, **options),
        settings(tmp_path / "out", max_steps=50, save_steps=50, per_device_train_batch_size=16),
    )
    assert json.loads((out / RECOVERY_FILE).read_text())["eval_accuracy"] > 0.6, "chance is a third"
    assert json.loads((out / "config.json").read_text())["id2label"] == dict(zip("012", names, strict=True))
    more = tmp_path / "more.jsonl"
    more.write_text(data.read_text() + json.dumps({"text": "w10", "label": "none"}) + "\n")
    with pytest.raises(PosEncError, match="'none'; expected one of the 3 classes"):
        train(request(out, more, scheme=None, task="classification"), settings(tmp_path / "other"))
    with pytest.raises(PosEncError, match="--label-column"):
        train(request(stock[architecture], data, **options, label_column="x"), settings(tmp_path / "other"))


def test_self_generated_text(stock: dict[str, Path], tmp_path: Path) -> None:
    out = train(request(stock["llama"], "self", self_generated_rows=24), settings(tmp_path / "out"))
    assert load_file(out / "self_generated.safetensors")["input_ids"].shape == (24, LENGTH)
    with pytest.raises(PosEncError, match="Only causal models"):
        train(request(stock["bert"], "self"), settings(tmp_path / "other"))


def test_trainable_positions_and_lora(stock: dict[str, Path], text: Path, tmp_path: Path) -> None:
    before = weights(stock["gpt2"])
    fixed = {name for name in before if name.endswith(("wte.weight", "ln_1.weight", "c_attn.weight", "c_fc.weight"))}
    out = train(request(stock["gpt2"], text, trainable="positions"), settings(tmp_path / "positions"))
    after = weights(out)
    assert all(torch.equal(after[name], before[name]) for name in fixed)
    positions = [name for name in after if "position_scheme" in name]
    assert positions
    lora = weights(train(request(stock["gpt2"], text, trainable="lora", lora_rank=2), settings(tmp_path / "lora")))
    assert set(lora) == set(after), "adapters are merged into the weights"
    changed = {name for name in fixed if not torch.equal(lora[name], before[name])}
    assert changed == {name for name in fixed if name.endswith(("c_attn.weight", "c_fc.weight"))}
    ranks = {int(torch.linalg.matrix_rank((lora[name] - before[name]).double(), atol=1e-6)) for name in changed}
    assert ranks == {2}
    assert all(after[name].any() and lora[name].any() for name in positions), "they start at zero"
    final = AutoModelForCausalLM.from_pretrained(tmp_path / "lora").state_dict()
    checkpoint, info = AutoModelForCausalLM.from_pretrained(
        tmp_path / "lora" / "checkpoint-6", output_loading_info=True
    )
    assert not [*info["missing_keys"], *info["unexpected_keys"]], "a checkpoint loads like any other model"
    assert all(torch.equal(weight, final[name]) for name, weight in checkpoint.state_dict().items())


@pytest.mark.slow
@pytest.mark.parametrize("trainable", ["positions", "lora"])
def test_new_head_is_always_trained(
    stock: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trainable: Any
) -> None:
    data = tmp_path / "rows.jsonl"
    rows = [{"text": word_level.text(12, seed), "label": seed % 2} for seed in range(16)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    models: list[Any] = []
    original_init = RecoveryTrainer.__init__

    def spy(self: Any, *args: Any, **kwargs: Any) -> None:
        models.append(kwargs["model"])
        original_init(self, *args, **kwargs)

    monkeypatch.setattr(RecoveryTrainer, "__init__", spy)
    train_request = request(stock["bert"], data, task="classification", trainable=trainable)
    train(train_request, settings(tmp_path / "out", max_steps=2))
    trained = {name for name, parameter in models[0].named_parameters() if parameter.requires_grad}
    assert {"classifier.weight", "classifier.bias"} <= trained
    assert not any(name.endswith("query.weight") for name in trained)
    assert any("lora_" in name for name in trained) == (trainable == "lora")


@pytest.fixture
def half(stock: dict[str, Path], tmp_path: Path) -> Path:
    """A checkpoint in bfloat16."""
    directory = tmp_path / "half"
    AutoModelForCausalLM.from_pretrained(stock["llama"], dtype=torch.bfloat16).save_pretrained(directory)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (directory / name).write_bytes((stock["llama"] / name).read_bytes())
    return directory


@some("trainable", ["positions", "lora"], fast=["lora"])
def test_frozen_weights_stay_in_half_precision(
    half: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trainable: Any
) -> None:
    """The teacher then shares them."""
    shared = []
    share = Teacher.share_frozen_weights
    monkeypatch.setattr(Teacher, "share_frozen_weights", lambda *args: shared.append(share(*args)))
    out = train(request(half, text, trainable=trainable), settings(tmp_path / "out", max_steps=2))
    checkpoint, stock_weights = weights(out / "checkpoint-2"), weights(half)
    positions = {name for name in checkpoint if "position_scheme" in name}
    assert positions
    assert {checkpoint[name].dtype for name in positions} == {torch.float32}
    assert {checkpoint[name].dtype for name in checkpoint.keys() - positions} == {torch.bfloat16}
    assert shared == [sum(weight.numel() for weight in stock_weights.values())]
    if trainable == "positions":
        assert all(torch.equal(checkpoint[name], stock_weights[name]) for name in stock_weights)
    assert {weight.dtype for weight in weights(out).values()} == {torch.bfloat16}


def test_half_precision_is_trained_in_float32(half: Path, text: Path, tmp_path: Path) -> None:
    out = train(request(half, text, scheme="alibi"), settings(tmp_path / "out", learning_rate=3e-4))
    checkpoint, final = weights(out / "checkpoint-6"), weights(out)
    assert {value.dtype for value in checkpoint.values()} == {torch.float32}
    assert {value.dtype for value in final.values()} == {torch.bfloat16}
    before = weights(half)
    norms = [name for name in final if name.endswith("layernorm.weight")]
    assert norms
    assert all(not torch.equal(checkpoint[name], before[name].float()) for name in norms)


@pytest.mark.parametrize(
    "changes", [{"gradient_checkpointing": True}, pytest.param({"bf16": True}, marks=pytest.mark.slow)]
)
def test_trainer_features(changes: dict[str, Any], stock: dict[str, Path], text: Path, tmp_path: Path) -> None:
    out = train(request(stock["llama"], text, recipe=ROOM_TO_LEARN), settings(tmp_path / "out", **changes))
    assert losses_in(out)[-1] < losses_in(out)[0]


@pytest.mark.slow
@pytest.mark.parametrize("packing", [True, False])
def test_gradient_accumulation(packing: bool, stock: dict[str, Path], text: Path, tmp_path: Path) -> None:
    """Two batches of two rows are one of four, also if they differ in tokens, up to float32 rounding in Adam."""
    halves = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    data, recipe = text, Recipe(loss_weights=LossWeights(label=0.3))
    if not packing:
        data, recipe = tmp_path / "rows.jsonl", Recipe(fit_ratio=0.0, loss_weights=LossWeights(label=0.3))
        rows = [{"text": word_level.text(3 + seed * 7 % 14, seed)} for seed in range(40)]
        data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    train_request = request(stock["llama"], data, packing=packing, recipe=recipe)
    first, second = (
        train(train_request, settings(tmp_path / name, learning_rate=1e-4, **changes))
        for name, changes in (("whole", {}), ("halves", halves))
    )
    torch.testing.assert_close(losses_in(second), losses_in(first), rtol=1e-4, atol=0)
    torch.testing.assert_close(weights(second), weights(first), rtol=0, atol=2e-5)
    assert max(losses_in(first)) > min(losses_in(first)) * 1.01, "control: losses differ between rows"


def test_streamed_data(stock: dict[str, Path], tmp_path: Path) -> None:
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps({"text": word_level.text(40, seed)}) + "\n" for seed in range(40)))
    out = train(request(stock["gpt2"], data, streaming=True), settings(tmp_path / "out"))
    assert losses_in(out)[-1] < losses_in(out)[0]
    with pytest.raises(PosEncError, match="--max-steps"):
        train(request(stock["gpt2"], data, streaming=True), settings(tmp_path / "other", max_steps=-1))


def test_variant_is_trained_further(stock: dict[str, Path], text: Path, tmp_path: Path) -> None:
    first = train(request(stock["gpt2"], text), settings(tmp_path / "first"))
    again = train(request(first, text, scheme=None), settings(tmp_path / "second"))
    assert AutoModelForCausalLM.from_pretrained(again).config.position_scheme == "t5"
    with pytest.raises(PosEncError, match="already has the position scheme"):
        train(request(first, text), settings(tmp_path / "third"))
    with pytest.raises(PosEncError, match="--scheme"):
        train(request(stock["gpt2"], text, scheme=None), settings(tmp_path / "third"))


def test_model_in_the_output_directory_is_kept(stock: dict[str, Path], text: Path, tmp_path: Path) -> None:
    with pytest.raises(PosEncError, match="inside --output-dir"):
        train(request(stock["gpt2"], text), settings(stock["gpt2"]))
    out = train(request(stock["gpt2"], text), settings(tmp_path / "out"))
    for train_request in (
        request(out / "checkpoint-4", text, scheme=None),
        request(stock["gpt2"], text, teacher_model=str(out / "checkpoint-4")),
    ):
        with pytest.raises(PosEncError, match="inside --output-dir"):
            train(train_request, settings(out), restart=True)
        assert (out / "checkpoint-4" / "model.safetensors").is_file()


def test_non_finite_loss_stops_the_run(stock: dict[str, Path], text: Path, tmp_path: Path) -> None:
    train_request = request(stock["gpt2"], text, recipe=NAIVE)
    with pytest.raises(PosEncError, match="step.*diverged.*no checkpoint"):
        train(train_request, settings(tmp_path / "out", learning_rate=1e30, max_grad_norm=0.0))
    assert not list((tmp_path / "out").glob("checkpoint-*"))


@pytest.mark.slow
def test_plain_fine_tuning_is_compared_with_the_original(stock: dict[str, Path], text: Path, tmp_path: Path) -> None:
    options = {"recipe": NAIVE, "eval_data": str(text)}
    out = train(request(stock["llama"], text, **options), settings(tmp_path / "out", max_steps=1))
    recovery = json.loads((out / RECOVERY_FILE).read_text())
    reference = train(request(stock["llama"], text, eval_data=str(text)), settings(tmp_path / "other", max_steps=1))
    expected = json.loads((reference / RECOVERY_FILE).read_text())
    for stage in ("original", "swapped"):
        assert recovery[stage] == pytest.approx(expected[stage])
    assert "started" not in recovery
