"""`hf-posenc train`, and the function behind it: from a stock checkpoint and a text to a variant."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
import word_level
from safetensors.torch import load_file
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForQuestionAnswering,
    TrainingArguments,
)
from typer.testing import CliRunner

from hf_posenc.cli import app
from hf_posenc.training.recipe import NAIVE, RECOMMENDED, Recipe
from hf_posenc.training.recovering import RecoveryTrainer
from hf_posenc.training.request import NOTE, Request
from hf_posenc.training.run import RECOVERY, train
from hf_posenc.training.saving import NotFinite
from hf_posenc.training.teacher import Teacher, Weights

LENGTH = 16


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(word_level.text(3000))
    return path


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    directory = tmp_path_factory.mktemp("stock")
    return {name: word_level.saved(name, directory / name) for name in ("bert", "gpt2", "llama")}


def settings(directory: Path, **changes: Any) -> TrainingArguments:
    common = {
        "max_steps": 6,
        "per_device_train_batch_size": 4,
        "learning_rate": 3e-3,
        "logging_steps": 1,
        "save_steps": 2,
        "use_cpu": True,
        "disable_tqdm": True,
        "report_to": "none",
    }
    return TrainingArguments(output_dir=str(directory), **{**common, **changes})


def request(model: Path, data: Any, **changes: Any) -> Request:
    return Request(model=str(model), data=str(data), **{"scheme": "t5", "train_length": str(LENGTH), **changes})


def losses_in(directory: Path) -> list[float]:
    state = json.loads((directory / "checkpoint-6" / "trainer_state.json").read_text())
    found = [entry for entry in state["log_history"] if "loss" in entry]
    return [entry.get("divergence", entry["loss"]) for entry in found]  # states fade, and the loss with them


def files_in(directory: Path) -> set[str]:
    return {path.name for path in directory.rglob("*") if path.is_file()}


def test_without_its_extra_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["hf_posenc.cli.train"], "find_spec", lambda name: None)
    done = CliRunner().invoke(app, ["train", "--model", "gpt2"])
    assert done.exit_code == 2
    assert "accelerate and datasets, not installed here: pip install hf_posenc[train]" in done.output


@pytest.mark.parametrize("architecture", ["bert", "gpt2"])
def test_the_original_is_measured_on_the_same_text(
    architecture: str, stock: dict[str, Path], text: Path, tmp_path: Path
) -> None:
    """Of a scheme that is the stock model's own, and a rate of nothing, both are the same model."""
    asked = {"scheme": "learned", "eval_data": str(text)}
    out = train(request(stock[architecture], text, **asked), settings(tmp_path / "out", learning_rate=0.0, max_steps=1))
    recovery = json.loads((out / RECOVERY).read_text())
    assert recovery["original"]["eval_loss"] == pytest.approx(recovery["eval_loss"], rel=1e-6)
    assert recovery["original"]["eval_perplexity"] == pytest.approx(recovery["eval_perplexity"], rel=1e-5)


@pytest.mark.parametrize("architecture", ["gpt2", "llama"])
def test_a_causal_model_is_trained(architecture: str, stock: dict[str, Path], text: Path, tmp_path: Path) -> None:
    out = train(request(stock[architecture], text, eval_data=str(text)), settings(tmp_path / "out"))
    losses = losses_in(out)
    assert losses[-1] < losses[0]
    model = AutoModelForCausalLM.from_pretrained(out)
    assert model.config.position_scheme == {"type": "t5"}
    assert model.config.use_cache, "as it was, although it is off while the model is trained"
    recovery = json.loads((out / RECOVERY).read_text())
    assert recovery["eval_perplexity"] > 1
    assert recovery["original"]["eval_perplexity"] != recovery["eval_perplexity"]
    pickles = {name for name in files_in(out) if name.endswith((".bin", ".pt", ".pth", ".pkl"))}
    assert not pickles
    assert {path.name for path in out.glob("checkpoint-*")} == {"checkpoint-2", "checkpoint-4", "checkpoint-6"}


@pytest.mark.parametrize("packing", [None, True])
def test_a_masked_model_is_trained(packing: bool | None, stock: dict[str, Path], text: Path, tmp_path: Path) -> None:
    out = train(request(stock["bert"], text, packing=packing), settings(tmp_path / "out"))
    assert losses_in(out)[-1] < losses_in(out)[0]
    assert type(AutoModelForMaskedLM.from_pretrained(out)).__name__ == "PosEncBertForMaskedLM"


def test_an_encoder_without_a_head_learns_the_states_of_its_teacher(
    stock: dict[str, Path], text: Path, tmp_path: Path
) -> None:
    headless = tmp_path / "headless"
    AutoModel.from_pretrained(stock["bert"]).save_pretrained(headless)
    word_level.tokenizer(encoder=True).save_pretrained(headless)
    out = train(request(headless, text, eval_data=str(text)), settings(tmp_path / "out"))
    assert losses_in(out)[-1] < losses_in(out)[0]
    assert set(json.loads((out / RECOVERY).read_text())) == {"eval_loss"}
    with pytest.raises(ValueError, match="has no head"):
        train(request(headless, text, recipe=NAIVE), settings(tmp_path / "other"))


@pytest.mark.parametrize("architecture", ["bert", "gpt2"])
def test_classes_are_those_of_the_data(architecture: str, stock: dict[str, Path], tmp_path: Path) -> None:
    """With the recipe that there is without words: no head of the original's can teach them, the labels do."""
    names = ["bad", "fair", "good"]
    rows = [{"text": f"{word_level.text(6, seed)} w{10 + seed % 3}", "label": names[seed % 3]} for seed in range(96)]
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    asked = {"task": "classification", "eval_data": str(data), "eval_split": "train"}
    out = train(
        request(stock[architecture], data, **asked),
        settings(tmp_path / "out", max_steps=50, save_steps=50, per_device_train_batch_size=16),
    )
    assert json.loads((out / RECOVERY).read_text())["eval_accuracy"] > 0.6, "a third is chance"
    assert json.loads((out / "config.json").read_text())["id2label"] == dict(zip("012", names, strict=True))
    more = tmp_path / "more.jsonl"
    more.write_text(data.read_text() + json.dumps({"text": "w10", "label": "none"}) + "\n")
    with pytest.raises(ValueError, match="'none' is none of the 3 classes"):
        train(request(out, more, scheme=None, task="classification"), settings(tmp_path / "other"))
    with pytest.raises(ValueError, match="--label-column"):
        train(request(stock[architecture], data, **asked, label_column="x"), settings(tmp_path / "other"))


def test_text_needs_a_tokenizer(stock: dict[str, Path], text: Path, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    AutoModelForCausalLM.from_pretrained(stock["gpt2"]).save_pretrained(bare)
    with pytest.raises(ValueError, match="has no tokenizer to read text with"):
        train(request(bare, text), settings(tmp_path / "out"))
    train(request(bare, "self", self_rows=8), settings(tmp_path / "out", max_steps=1))


def test_a_causal_model_needs_no_text(stock: dict[str, Path], tmp_path: Path) -> None:
    wanted = request(stock["llama"], "self", self_rows=24)
    out = train(wanted, settings(tmp_path / "out"))
    assert load_file(out / "own_text.safetensors")["input_ids"].shape == (24, LENGTH)
    with pytest.raises(ValueError, match="only a causal model"):
        train(request(stock["bert"], "self"), settings(tmp_path / "other"))


def weights(directory: Path) -> dict[str, torch.Tensor]:
    return load_file(directory / "model.safetensors")


def test_only_positions_or_those_and_adapters(stock: dict[str, Path], text: Path, tmp_path: Path) -> None:
    before = weights(stock["gpt2"])
    fixed = {name for name in before if name.endswith(("wte.weight", "ln_1.weight", "c_attn.weight", "c_fc.weight"))}
    out = train(request(stock["gpt2"], text, trained="positions"), settings(tmp_path / "positions"))
    after = weights(out)
    assert all(torch.equal(after[name], before[name]) for name in fixed)
    own = [name for name in after if "position_scheme" in name]
    assert own
    lora = weights(train(request(stock["gpt2"], text, trained="lora", lora_rank=2), settings(tmp_path / "lora")))
    assert set(lora) == set(after), "adapters are merged into the weights"
    changed = {name for name in fixed if not torch.equal(lora[name], before[name])}
    assert changed == {name for name in fixed if name.endswith(("c_attn.weight", "c_fc.weight"))}
    ranks = {int(torch.linalg.matrix_rank((lora[name] - before[name]).double(), atol=1e-6)) for name in changed}
    assert ranks == {2}
    assert all(after[name].any() and lora[name].any() for name in own), "they begin with zeros"
    at_the_end = AutoModelForCausalLM.from_pretrained(tmp_path / "lora").state_dict()
    checkpoint, info = AutoModelForCausalLM.from_pretrained(
        tmp_path / "lora" / "checkpoint-6", output_loading_info=True
    )
    assert not [*info["missing_keys"], *info["unexpected_keys"]], "a checkpoint loads as any other"
    assert all(torch.equal(weight, at_the_end[name]) for name, weight in checkpoint.state_dict().items())


def test_a_handover_runs_over_its_share_of_the_steps(stock: dict[str, Path], text: Path, tmp_path: Path) -> None:
    recipe = Recipe(fit=0.0, handover=0.5)
    out = train(request(stock["llama"], text, scheme="alibi", recipe=recipe), settings(tmp_path / "out"))
    on_the_way = json.loads((out / "checkpoint-2" / "config.json").read_text())["position_scheme"]
    assert on_the_way["handover"] == {"from": "stock", "steps": 3, "shape": "linear", "step": 2}
    for done in ("checkpoint-4", "."):
        scheme = json.loads((out / done / "config.json").read_text())["position_scheme"]
        assert scheme in ("alibi", {"type": "alibi"})


@pytest.mark.parametrize("architecture", ["bert", "gpt2", "llama"])
def test_the_recommended_recipe_is_what_there_is_without_words(
    stock: dict[str, Path], text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, architecture: str
) -> None:
    """A rotation's attention is fitted, BERT's table leaves its mean, then there is a teacher; plain fine-tuning has
    none of it."""
    seen: list[Any] = []
    built = RecoveryTrainer.__init__

    def spy(self: Any, *args: Any, **kwargs: Any) -> None:
        seen.append((kwargs, {name: w.clone() for name, w in kwargs["model"].state_dict().items()}))
        built(self, *args, **kwargs)

    monkeypatch.setattr(RecoveryTrainer, "__init__", spy)
    train(request(stock[architecture], text), settings(tmp_path / "a", max_steps=2))
    train(request(stock[architecture], text, recipe=NAIVE), settings(tmp_path / "b", max_steps=2))
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


def test_a_handover_that_the_scheme_names_is_kept(stock: dict[str, Path], text: Path, tmp_path: Path) -> None:
    scheme = {"type": "alibi", "handover": {"from": "stock", "steps": 4}}
    out = train(request(stock["gpt2"], text, scheme=scheme), settings(tmp_path / "out"))
    on_the_way = json.loads((out / "checkpoint-2" / "config.json").read_text())["position_scheme"]
    assert on_the_way["handover"]["step"] == 2
    assert json.loads((out / "config.json").read_text())["position_scheme"] == {"type": "alibi"}


@pytest.mark.parametrize("trained", ["positions", "lora"])
def test_a_new_head_is_trained_with_whatever_else_is(
    stock: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trained: Any
) -> None:
    data = tmp_path / "rows.jsonl"
    rows = [{"text": word_level.text(12, seed), "label": seed % 2} for seed in range(16)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    models: list[Any] = []
    built = RecoveryTrainer.__init__

    def spy(self: Any, *args: Any, **kwargs: Any) -> None:
        models.append(kwargs["model"])
        built(self, *args, **kwargs)

    monkeypatch.setattr(RecoveryTrainer, "__init__", spy)
    asked = request(stock["bert"], data, task="classification", trained=trained)
    train(asked, settings(tmp_path / "out", max_steps=2))
    free = {name for name, parameter in models[0].named_parameters() if parameter.requires_grad}
    assert {"classifier.weight", "classifier.bias"} <= free
    assert not any(name.endswith("query.weight") for name in free)
    assert any("lora_" in name for name in free) == (trained == "lora")


def test_half_precision_is_trained_in_float32_and_saved_as_it_was(
    stock: dict[str, Path], text: Path, tmp_path: Path
) -> None:
    half = tmp_path / "half"
    AutoModelForCausalLM.from_pretrained(stock["llama"], dtype=torch.bfloat16).save_pretrained(half)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (half / name).write_bytes((stock["llama"] / name).read_bytes())
    out = train(request(half, text, scheme="alibi"), settings(tmp_path / "out", learning_rate=3e-4))
    on_the_way, after = weights(out / "checkpoint-6"), weights(out)
    assert {value.dtype for value in on_the_way.values()} == {torch.float32}
    assert {value.dtype for value in after.values()} == {torch.bfloat16}
    before = weights(half)
    norms = [name for name in after if name.endswith("layernorm.weight")]
    assert norms
    assert all(not torch.equal(on_the_way[name], before[name].float()) for name in norms)


def test_a_head_without_a_task_is_not_left_out(stock: dict[str, Path], text: Path, tmp_path: Path) -> None:
    AutoModelForQuestionAnswering.from_pretrained(stock["bert"]).save_pretrained(tmp_path / "answers")
    with pytest.raises(ValueError, match="a head that there is no task for"):
        train(request(tmp_path / "answers", text), settings(tmp_path / "out"))


def test_rows_that_there_is_nothing_to_learn_from(stock: dict[str, Path], text: Path, tmp_path: Path) -> None:
    longer = str(4 * tiny.TRAINED_LENGTH)
    with pytest.raises(ValueError, match="longer than the"):
        train(request(stock["gpt2"], "self", train_length=longer), settings(tmp_path / "a"))
    with pytest.raises(ValueError, match="longer than the"):
        train(request(stock["bert"], text, task="states", train_length=longer), settings(tmp_path / "b"))
    with pytest.raises(ValueError, match="smooths labels"):
        train(request(stock["gpt2"], text), settings(tmp_path / "c", label_smoothing_factor=0.1))
    with pytest.raises(ValueError, match="take one away"):
        train(request(stock["gpt2"], text, teacher=str(stock["gpt2"]), recipe=NAIVE), settings(tmp_path / "d"))


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


@pytest.mark.parametrize("changes", [{"gradient_checkpointing": True}, {"bf16": True}])
def test_what_users_of_trainer_expect(
    changes: dict[str, Any], stock: dict[str, Path], text: Path, tmp_path: Path
) -> None:
    out = train(request(stock["llama"], text), settings(tmp_path / "out", **changes))
    assert losses_in(out)[-1] < losses_in(out)[0]


@pytest.mark.parametrize("packing", [True, False])
def test_gradients_are_accumulated(packing: bool, stock: dict[str, Path], text: Path, tmp_path: Path) -> None:
    """Twice two rows are four, also where rows are of different lengths and a batch has more tokens than the other.
    The sums are taken in another order, in float32, and Adam divides by their size."""
    halves = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    data, recipe = text, Recipe(weights=Weights(labels=0.3))
    if not packing:
        data, recipe = tmp_path / "rows.jsonl", Recipe(fit=0.0, weights=Weights(labels=0.3))
        rows = [{"text": word_level.text(3 + seed * 7 % 14, seed)} for seed in range(40)]
        data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    wanted = request(stock["llama"], data, packing=packing, recipe=recipe)
    first, second = (
        train(wanted, settings(tmp_path / name, learning_rate=1e-4, **changes))
        for name, changes in (("whole", {}), ("halves", halves))
    )
    torch.testing.assert_close(losses_in(second), losses_in(first), rtol=1e-4, atol=0)
    torch.testing.assert_close(weights(second), weights(first), rtol=0, atol=2e-5)
    assert max(losses_in(first)) > min(losses_in(first)) * 1.01, "the losses of different rows are further apart"


def test_streams_are_trained_on(stock: dict[str, Path], tmp_path: Path) -> None:
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps({"text": word_level.text(40, seed)}) + "\n" for seed in range(40)))
    out = train(request(stock["gpt2"], data, streaming=True), settings(tmp_path / "out"))
    assert losses_in(out)[-1] < losses_in(out)[0]
    with pytest.raises(ValueError, match="a stream has no end"):
        train(request(stock["gpt2"], data, streaming=True), settings(tmp_path / "other", max_steps=-1))


def test_a_variant_is_trained_on(stock: dict[str, Path], text: Path, tmp_path: Path) -> None:
    first = train(request(stock["gpt2"], text), settings(tmp_path / "first"))
    again = train(request(first, text, scheme=None), settings(tmp_path / "second"))
    assert AutoModelForCausalLM.from_pretrained(again).config.position_scheme == {"type": "t5"}
    with pytest.raises(ValueError, match="is a variant already"):
        train(request(first, text), settings(tmp_path / "third"))
    with pytest.raises(ValueError, match="name the position scheme"):
        train(request(stock["gpt2"], text, scheme=None), settings(tmp_path / "third"))
    with pytest.raises(ValueError, match="where the model comes from"):
        train(request(stock["gpt2"], text), settings(stock["gpt2"]))


def test_a_loss_that_is_no_number_ends_the_run(stock: dict[str, Path], text: Path, tmp_path: Path) -> None:
    wanted = request(stock["gpt2"], text, recipe=NAIVE)
    with pytest.raises(NotFinite, match="went astray.*there is no checkpoint yet"):
        train(wanted, settings(tmp_path / "out", learning_rate=1e30, max_grad_norm=0.0))
    assert not list((tmp_path / "out").glob("checkpoint-*"))


def test_the_command_line(stock: dict[str, Path], text: Path, tmp_path: Path) -> None:
    config = tmp_path / "run.yaml"
    config.write_text(
        f"model: {stock['gpt2']}\ndata: {text}\nscheme: {{type: t5, num_buckets: 8}}\ntrain-length: {LENGTH}\n"
        "max_steps: 6\nper-device-train-batch-size: 2\nuse_cpu: true\nsave_steps: 3\n"
    )
    run = CliRunner()
    out = str(tmp_path / "out")
    line = ["train", "--config", str(config), "--output-dir", out, "--max-steps", "3", "--state-weight", "2"]
    done = run.invoke(app, line)
    assert done.exit_code == 0, done.output
    note = json.loads((tmp_path / "out" / NOTE).read_text())
    assert note["finished"]
    assert note["settings"]["max_steps"] == 3, "the command line has the last word"
    assert note["settings"]["rows_a_step"] == 2
    assert note["request"]["scheme"] == {"type": "t5", "num_buckets": 8}
    assert note["request"]["recipe"]["weights"]["states"] == 2
    again = run.invoke(app, line)
    assert again.exit_code == 2
    assert "holds a finished run" in again.output
    assert run.invoke(app, [*line, "--restart"]).exit_code == 0
    as_json = run.invoke(app, [*line, "--restart", "--json", "--eval-data", str(text)])
    told = json.loads(as_json.stdout)
    assert (told["directory"], told["steps"], told["position_scheme"]["num_buckets"]) == (out, 3, 8)
    assert told["recovery"]["eval_perplexity"] > 1
    for wrong, told in (
        (["train", "--model", "m"], "--data is missing"),
        ([*line, "--restart", "--train", "some"], "one of all, positions, lora"),
        ([*line, "--restart", "--handover-share", "7"], "from 0 to 1"),
        ([*line, "--restart", "--state-weight", "-1"], "the weight of states"),
        ([*line, "--restart", "--max-step", "1"], "Did you mean --max-steps?"),
        ([*line, "--restart", "--report-to", "clearml"], "pip install clearml"),
        ([*line, "--recipe", "x"], "no recipe 'x'"),
        ([*line, "--restart", "--scheme", "{"], "--scheme must be"),
        ([*line, "--restart", "--no-such-option", "1"], "no-such-option"),
    ):
        refused = run.invoke(app, wrong)
        assert refused.exit_code == 2, refused.output
        assert told in refused.output
    assert json.loads((tmp_path / "out" / NOTE).read_text())["finished"], "what is refused throws nothing away"


def test_a_file_of_options_is_read_as_the_command_line_is(stock: dict[str, Path], text: Path, tmp_path: Path) -> None:
    """YAML takes 1e-1 for words, and a list is several values of one option."""
    config = tmp_path / "run.yaml"
    lines = {"model": stock["gpt2"], "data": text, "scheme": "alibi", "train_length": LENGTH, "max_steps": 2}
    lines |= {"fit-share": "1e-1", "learning_rate": "1e-3", "use_cpu": "true", "report_to": "[none]", "seed": "null"}

    def asked(**changes: Any) -> Any:
        config.write_text("".join(f"{name}: {value}\n" for name, value in {**lines, **changes}.items()))
        return CliRunner().invoke(app, ["train", "--config", str(config), "--output-dir", str(tmp_path / "out")])

    for changes, told in (
        ({"teacher": "maybe"}, "'teacher' in --config.*must be true or false"),
        ({"lora_rank": 1.5}, "must be a whole number"),
        ({"fit-share": "much"}, "must be a number"),
        ({"data": "[a, b]"}, "must be one value"),
        ({"restart": "true"}, "for the command line only"),
    ):
        refused = asked(**changes)
        assert refused.exit_code == 2, refused.output
        assert re.search(told, refused.output), refused.output
    assert not (tmp_path / "out").exists()
    done = asked()
    assert done.exit_code == 0, done.output
    assert json.loads((tmp_path / "out" / NOTE).read_text())["request"]["recipe"]["fit"] == 0.1
