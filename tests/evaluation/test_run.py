"""`hf_posenc.evaluate`: resuming, refusals, several processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import BertModel, GPT2Model
from transformers.utils import ModelOutput

import hf_posenc
from hf_posenc.errors import PosEncError
from hf_posenc.evaluation import EvaluationReport
from hf_posenc.evaluation import run as run_module
from hf_posenc.evaluation.models import EvaluatedModel
from hf_posenc.evaluation.results import EvaluationStopped
from tests.support import tiny_models as tiny
from tests.support.evaluation import make_tokenizer, random_ids, save_checkpoint, to_text

ROOT = Path(__file__).parents[2]


@pytest.fixture
def workspace(tmp_path: Path) -> dict[str, str]:
    """A stock GPT-2 with a limit of 48 tokens, a variant without a limit, and a text."""
    (tmp_path / "text.txt").write_text(to_text(random_ids(600)))
    return {
        "stock": save_checkpoint(tmp_path / "stock", "gpt2"),
        "alibi": save_checkpoint(tmp_path / "alibi", "gpt2", "alibi"),
        "text": str(tmp_path / "text.txt"),
        "results": str(tmp_path / "out" / "results.json"),
    }


def record_forward_passes(monkeypatch: pytest.MonkeyPatch) -> list[torch.Size]:
    """The input shapes of all forward passes from now on."""
    shapes: list[torch.Size] = []
    original = EvaluatedModel.base_outputs

    def base_outputs(self: EvaluatedModel, input_ids_BN: torch.Tensor) -> ModelOutput:
        shapes.append(input_ids_BN.shape)
        return original(self, input_ids_BN)

    monkeypatch.setattr(EvaluatedModel, "base_outputs", base_outputs)
    return shapes


def run(workspace: dict[str, str], **changes: Any) -> EvaluationReport:
    arguments = {"lengths": [12, 24, "2x"], "results_path": workspace["results"], "progress": False, **changes}
    models = [workspace["stock"], workspace["alibi"]]
    return hf_posenc.evaluate(models, arguments.pop("data", workspace["text"]), **arguments)


def test_an_interrupted_evaluation_resumes(workspace: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    uninterrupted = run(workspace, results_path=None)
    original, finished = run_module.METRIC_FUNCTIONS["perplexity"], []

    def interrupt(model: EvaluatedModel, length: int, *rest: Any) -> Any:
        if len(finished) == 4:
            raise KeyboardInterrupt
        finished.append((model.name, length))
        return original(model, length, *rest)

    monkeypatch.setitem(run_module.METRIC_FUNCTIONS, "perplexity", interrupt)
    with pytest.raises(KeyboardInterrupt):
        run(workspace)
    saved = json.loads(Path(workspace["results"]).read_text())["results"]["perplexity"]
    assert [(record["model"], record["length"]) for record in saved] == finished
    monkeypatch.setitem(run_module.METRIC_FUNCTIONS, "perplexity", original)
    shapes = record_forward_passes(monkeypatch)
    assert run(workspace) == uninterrupted
    assert shapes
    assert not [shape for shape in shapes if shape[1] == 12]
    shapes.clear()
    assert run(workspace) == uninterrupted
    assert not shapes
    more_lengths = run(workspace, lengths=[12, 30])
    assert {shape[1] for shape in shapes} == {30}
    assert more_lengths.perplexity[0] == uninterrupted.perplexity[0]
    assert not list(Path(workspace["results"]).parent.glob("*.tmp"))


def test_results_of_another_evaluation_are_not_mixed_in(
    workspace: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run(workspace)
    with pytest.raises(PosEncError, match=r"text was .*--restart"):
        run(workspace, data=[to_text(random_ids(600, seed=1))])
    with pytest.raises(PosEncError, match="stride was None and is now 4"):
        run(workspace, stride=4)
    with pytest.raises(PosEncError, match="dtype was None and is now 'bfloat16'"):
        run(workspace, dtype="bfloat16")
    saved = Path(workspace["results"]).read_text()
    run(workspace, passkey_trials=3, batch_tokens=50)  # perplexity does not depend on these
    assert Path(workspace["results"]).read_text() == saved
    save_checkpoint(Path(workspace["alibi"]), "gpt2", "alibi", seed=1)
    with pytest.raises(PosEncError, match="weights was"):
        run(workspace)
    shapes = record_forward_passes(monkeypatch)
    run(workspace, restart=True)
    assert shapes
    Path(workspace["results"]).write_text("[]")
    with pytest.raises(PosEncError, match="evaluation results"):
        run(workspace)


def test_every_edit_of_a_model_is_noticed(workspace: dict[str, str]) -> None:
    """One value of one tensor, and a field of the config that leaves the weights as they are."""
    run(workspace)
    path = Path(workspace["alibi"]) / "model.safetensors"
    tensors, content = load_file(path), path.read_bytes()
    table = tensors["transformer.wte.weight"]
    table.view(-1)[len(table.view(-1)) // 2 + 3] += 1
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(PosEncError, match="weights was"):
        run(workspace)
    path.write_bytes(content)
    run(workspace)
    config = Path(workspace["alibi"]) / "config.json"
    config.write_text(config.read_text().replace('"layer_norm_epsilon": 1e-05', '"layer_norm_epsilon": 0.1'))
    with pytest.raises(PosEncError, match="weights was"):
        run(workspace)


def test_only_a_refused_length_is_stored_as_a_limit(workspace: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise PosEncError("another problem")

    monkeypatch.setattr(GPT2Model, "forward", refuse)
    with pytest.raises(PosEncError, match="another problem"):
        run(workspace, lengths=[12])
    assert not Path(workspace["results"]).exists()


@pytest.mark.parametrize("text", ["{", "[" * 5000, '{"settings": {}, "models": {}, "results": {"perplexity": [1]}}'])
def test_damaged_results_are_refused(text: str, workspace: dict[str, str]) -> None:
    Path(workspace["results"]).parent.mkdir()
    Path(workspace["results"]).write_text(text)
    with pytest.raises(PosEncError, match="does not contain evaluation results"):
        run(workspace)


def test_out_of_memory_is_tried_again(workspace: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    original = run_module.METRIC_FUNCTIONS["perplexity"]

    def out_of_memory(model: EvaluatedModel, length: int, *rest: Any) -> Any:
        if length == 24:
            raise EvaluationStopped("out of memory", permanent=False)
        return original(model, length, *rest)

    monkeypatch.setitem(run_module.METRIC_FUNCTIONS, "perplexity", out_of_memory)
    first = run(workspace)
    stopped = [result.length for result in first.perplexity if result.stopped and "memory" in result.stopped.reason]
    assert stopped == [24, 24]
    monkeypatch.setitem(run_module.METRIC_FUNCTIONS, "perplexity", original)
    second = run(workspace)
    assert [(result.model, result.length) for result in second.perplexity if result.stopped] == [("stock", 96)]


def test_models_are_named_by_path_or_mapping(workspace: dict[str, str], tmp_path: Path) -> None:
    arguments = {"lengths": [12], "progress": False}
    paths = [save_checkpoint(tmp_path / name / "model", "gpt2") for name in ("a", "b")]
    assert hf_posenc.evaluate(paths, workspace["text"], **arguments).models == tuple(paths)
    with pytest.raises(PosEncError, match="distinct names"):
        hf_posenc.evaluate([paths[0], paths[0]], workspace["text"], **arguments)


def test_invalid_requests_are_refused(workspace: dict[str, str], tmp_path: Path) -> None:
    model, ids, arguments = tiny.model("gpt2"), random_ids(100), {"lengths": [12], "progress": False}
    with pytest.raises(PosEncError, match="missing.*Hub"):
        hf_posenc.evaluate(str(tmp_path / "missing"), workspace["text"], **arguments)
    with pytest.raises(PosEncError, match="dtype"):
        hf_posenc.evaluate(model, ids, dtype="bfloat16", **arguments)
    with pytest.raises(PosEncError, match="tokenizer"):
        hf_posenc.evaluate(model, ["w5 w6"], **arguments)
    with pytest.raises(TypeError, match="color"):
        hf_posenc.evaluate(model, ids, color="red", **arguments)
    with pytest.raises(PosEncError, match="99.*61"):
        hf_posenc.evaluate(model, [[5, 99]], **arguments)
    with pytest.raises(PosEncError, match="at least one model"):
        hf_posenc.evaluate([], ids, **arguments)
    with pytest.raises(PosEncError, match="speed.*perplexity"):
        hf_posenc.evaluate(model, ids, metrics=["speed"], **arguments)


def test_live_models_keep_their_mode() -> None:
    model = tiny.model("gpt2").train()
    hf_posenc.evaluate(model, random_ids(100), lengths=[12], progress=False)
    assert model.training


def test_lengths_in_tokens_do_not_need_a_trained_length() -> None:
    models = {"a": tiny.model("gpt2"), "b": tiny.model("llama", max_position_embeddings=64)}
    report = hf_posenc.evaluate(models, random_ids(200), lengths=[20, "40"], progress=False)
    assert report.trained_length is None
    assert [result.length for result in report.perplexity] == [20, 40] * 2
    assert "x)" not in str(report)
    with pytest.raises(PosEncError, match="a: 48, b: 64"):
        hf_posenc.evaluate(models, random_ids(200), lengths=[20, "1x"], progress=False)


def test_a_head_that_is_not_in_the_checkpoint_is_refused(tmp_path: Path) -> None:
    BertModel(tiny.config("bert")).save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    arguments = {"lengths": [20], "progress": False}
    with pytest.raises(PosEncError, match=r"masked-lm, such as cls\."):
        hf_posenc.evaluate(str(tmp_path), random_ids(100), task="masked-lm", **arguments)
    report = hf_posenc.evaluate(str(tmp_path), random_ids(100), metrics=["similarity"], **arguments)
    assert report.similarity[0].cosine is not None
    assert report.similarity[0].cosine.value == pytest.approx(1.0)


@pytest.mark.slow
def test_two_processes_give_the_results_of_one(workspace: dict[str, str]) -> None:
    """Batches differ between the two, so matrix products round differently: equal up to float32 rounding."""
    pytest.importorskip("accelerate", reason="the extra `train` is not installed")
    launch = ["-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--num_machines", "1"]
    launch += ["--main_process_port", "0", "--mixed_precision", "no", "--dynamo_backend", "no"]
    command = [workspace["stock"], workspace["alibi"], "--data", workspace["text"], "--lengths", "0.5x,2x"]
    command += ["--metrics", "all", "--passkey-trials", "3", "--passkey-depths", "0,1", "--batch-tokens", "100"]
    command += ["--results", workspace["results"], "--json"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
    environment["ACCELERATE_USE_CPU"] = "true"  # use the multi-GPU launcher on CPUs
    process = subprocess.run(
        [sys.executable, *launch, "-m", "hf_posenc", "eval", *command],
        env=environment, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert process.returncode == 0, process.stderr[-3000:]
    two = json.loads(process.stdout)
    single = run(
        workspace, results_path=None, lengths=["0.5x", "2x"], batch_tokens=100, passkey_trials=3,
        passkey_depths=(0.0, 1.0), metrics=["perplexity", "passkey", "order", "similarity"],
    )  # fmt: skip
    assert two.pop("num_processes") == 2
    assert is_close({**two, "num_processes": 1}, json.loads(json.dumps(single.to_dict())))
    assert two["perplexity"][1]["stopped"]["max_length"] == 48
    assert len(json.loads(Path(workspace["results"]).read_text())["results"]["perplexity"]) == 4


def is_close(actual: Any, expected: Any) -> bool:
    """Equal except for rounding of floats at any depth."""
    if isinstance(expected, dict):
        return actual.keys() == expected.keys() and all(is_close(actual[key], expected[key]) for key in expected)
    if isinstance(expected, list):
        return len(actual) == len(expected) and all(map(is_close, actual, expected))
    return actual == (pytest.approx(expected, rel=1e-4, abs=1e-5) if isinstance(expected, float) else expected)
