"""`hf-posenc inspect` says what a directory holds, and finds whatever is wrong with it, without loading weights."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModel, BertConfig, BertModel
from typer.testing import CliRunner

import hf_posenc
from hf_posenc.checkpoints.inspection import inspect
from hf_posenc.checkpoints.manifest import write_manifest
from hf_posenc.cli import app
from tests.support import tiny_models as tiny
from tests.support import word_level_tokenizer as word_level
from tests.support.cases import CASES, Case, pairs

T5 = {"type": "t5", "shared": False, "num_buckets": 8, "max_distance": 20}


def saved(directory: Path, architecture: str = "gpt2", scheme: Any = T5, **how: Any) -> Path:
    tiny.model(architecture, scheme, torch.float32).save_pretrained(directory, **how)
    return directory


def run(*arguments: Any) -> tuple[int, str, str]:
    done = CliRunner().invoke(app, ["inspect", *map(str, arguments)])
    return done.exit_code, done.stdout, done.stderr


def change(path: Path, **values: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


@pairs(["bert", "gpt2", "llama"], CASES)
def test_it_says_of_files_what_is_true_of_the_model(
    case: Case, architecture: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tiny.model(architecture, case.scheme, torch.float32)
    model.save_pretrained(tmp_path)
    found = inspect(tmp_path)
    assert not found.problems
    assert not found.warnings
    assert found.kind == "variant"
    assert found.position_scheme == case.scheme
    assert found.architecture == type(model).__name__
    assert found.explanation == hf_posenc.explain(model)
    assert found.parameters == sum(parameter.numel() for parameter in model.parameters())
    own = sum(parameter.numel() for name, parameter in model.named_parameters() if "position_scheme" in name)
    assert found.scheme_parameters == own


@pytest.mark.parametrize("architecture", ["bert", "gpt2", "llama"])
@pytest.mark.parametrize("headless", [False, True])
def test_stock_checkpoints_are_whole_too(architecture: str, headless: bool, tmp_path: Path) -> None:
    model = tiny.model(architecture, None, torch.float32)
    (model.base_model if headless else model).save_pretrained(tmp_path)
    code, out, _ = run(tmp_path)
    assert code == 0
    assert ": stock\n" in out
    assert type(model.base_model if headless else model).__name__ in out
    assert "of the scheme 0" in out


def test_what_people_and_programs_read(tmp_path: Path) -> None:
    directory = saved(tmp_path / "variant", max_shard_size="60KB")
    change(directory / "config.json", posenc_base_model="openai-community/gpt2")
    code, out, err = run(directory)
    assert (code, err) == (0, "")
    for words in ('"num_buckets": 8', "openai-community/gpt2", "layers 0 to 2: t5: score", "of the scheme 96"):
        assert words in out
    code, out, _ = run(directory, "--json")
    found = json.loads(out)
    assert code == 0
    assert found["healthy"]
    assert found["position_scheme"] == T5
    assert len(found["files"]) > 1
    assert len(found["explanation"]["layers"]) == tiny.LAYERS
    help_text = CliRunner().invoke(app, ["inspect", "--help"]).stdout
    assert "hf-posenc inspect gpt2-rope" in help_text


def _cut(directory: Path) -> None:
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-10])


def _without(word: str) -> Any:
    def drop(directory: Path) -> None:
        path = directory / "model.safetensors"
        kept = {name: value for name, value in load_file(path).items() if word not in name}
        save_file(kept, path, metadata={"format": "pt"})

    return drop


def _no_weights(directory: Path) -> None:
    (directory / "model.safetensors").rename(directory / "pytorch_model.bin")


DAMAGE = {
    "bytes long, but its header": _cut,
    "tensors that the config's model needs are missing.*position_scheme": _without("position_scheme"),
    "missing.*ln_f": _without("ln_f"),
    "and the weights are of 2": _without("h.2."),
    "only safetensors.*pytorch_model.bin, a pickle": _no_weights,
    "is of shape": lambda directory: change(directory / "config.json", vocab_size=99),
    "no config of transformers": lambda directory: (directory / "config.json").write_text("{"),
    "family": lambda directory: change(directory / "config.json", architectures=["os"]),
    "num_buckets": lambda directory: change(directory / "config.json", position_scheme={**T5, "num_buckets": -1}),
    "neither a config.json nor": lambda directory: (directory / "config.json").unlink(),
    "is no directory": shutil.rmtree,
}


@pytest.mark.parametrize("words", DAMAGE)
def test_damage_is_named_and_exits_with_2(words: str, tmp_path: Path) -> None:
    directory = saved(tmp_path / "variant")
    assert run(directory)[0] == 0
    DAMAGE[words](directory)
    code, _, err = run(directory)
    assert code == 2
    assert err.startswith("error: ")
    with pytest.raises(ValueError, match=words):
        raise ValueError(err.replace("\n", " "))


def test_a_missing_shard_of_an_index(tmp_path: Path) -> None:
    directory = saved(tmp_path, max_shard_size="60KB")
    sorted(directory.glob("*.safetensors"))[0].unlink()
    code, out, err = run(directory, "--json")
    assert code == 2
    assert "is missing" in err
    assert json.loads(out)["problems"]


def test_what_does_not_belong_is_a_warning(tmp_path: Path) -> None:
    directory = saved(tmp_path)
    path = directory / "model.safetensors"
    save_file({**load_file(path), "stray": torch.zeros(3)}, path, metadata={"format": "pt"})
    (directory / "old").mkdir()
    (directory / "old" / "optimizer.pt").write_bytes(b"\x80\x04")
    code, out, _ = run(directory)
    assert code == 0
    assert "warning: 1 tensors that the config's model does not have: ['stray']" in out
    assert "warning: old/optimizer.pt is a pickle" in out


def test_no_weight_is_read_or_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = saved(tmp_path)
    for name in ("safetensors.safe_open", "torch.load", "safetensors.torch.load_file"):
        monkeypatch.setattr(name, lambda *_, **__: pytest.fail("weights were read"))
    made: list[int] = []
    real = torch.Tensor.normal_
    monkeypatch.setattr(
        torch.Tensor, "normal_", lambda self, *a, **k: (made.append(self.is_meta), real(self, *a, **k))[1]
    )
    assert run(directory)[0] == 0
    assert all(made)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output directory of a short run with two checkpoints."""
    home = tmp_path_factory.mktemp("run")
    source = word_level.saved("gpt2", home / "model")
    (home / "text.txt").write_text(word_level.text(2000))
    line = ["train", "--model", source, "--scheme", "alibi", "--data", home / "text.txt", "--train-length", 16]
    line += ["--output-dir", home / "out", "--recipe", "naive", "--max-steps", 4, "--save-steps", 2]
    line += ["--per-device-train-batch-size", 2, "--report-to", "none", "--use-cpu", "--disable-tqdm", "true"]
    done = CliRunner().invoke(app, list(map(str, line)))
    assert done.exit_code == 0, done.output
    return home / "out"


@pytest.fixture
def output(trained: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained, tmp_path / "out"))


def test_a_finished_run_and_its_checkpoints(output: Path) -> None:
    code, out, _ = run(output)
    assert code == 0
    assert "finished; last whole checkpoint: checkpoint-4" in out
    assert "layers 0 to 2: alibi: score" in out
    code, out, _ = run(output / "checkpoint-2", "--json")
    found = json.loads(out)
    assert (code, found["sealed"], found["kind"]) == (0, True, "variant")


def test_a_run_that_was_cut_short(output: Path) -> None:
    for path in output.glob("*.safetensors"):
        path.unlink()
    (output / "config.json").unlink()
    change(output / "run.json", finished=False)
    code, out, _ = run(output)
    assert code == 0
    assert "not finished; last whole checkpoint: checkpoint-4" in out
    weights = output / "checkpoint-4" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x01")
    code, out, err = run(output)
    assert code == 2
    assert "last whole checkpoint: checkpoint-2" in out
    assert "checkpoint-4: model.safetensors is not what was written" in err
    code, _, err = run(output / "checkpoint-4")
    assert code == 2
    assert "is not what was written" in err
    (output / "checkpoint-4" / "manifest.json").unlink()
    write_manifest(output / "checkpoint-4")
    assert run(output)[0] == 0


def test_a_note_that_is_none(output: Path) -> None:
    (output / "run.json").write_text("[" * 50_000)
    code, _, err = run(output)
    assert code == 2
    assert "no note of a training run" in err


def test_old_relative_checkpoints_are_whole(tmp_path: Path) -> None:
    model = BertModel(BertConfig(**{**tiny.config("bert").to_dict(), "position_embedding_type": "relative_key"}))
    tensors = {name: value.clone() for name, value in model.state_dict().items() if "position_scheme" not in name}
    tensors["embeddings.position_embeddings.weight"] = torch.zeros(tiny.TRAINED_LENGTH, tiny.WIDTH)
    for layer in range(tiny.LAYERS):
        name = f"encoder.layer.{layer}.attention.self.distance_embedding.weight"
        tensors[name] = torch.zeros(2 * tiny.TRAINED_LENGTH - 1, tiny.WIDTH // tiny.HEADS)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    values = {**tiny.config("bert").to_dict(), "position_embedding_type": "relative_key", "model_type": "bert"}
    (tmp_path / "config.json").write_text(json.dumps({**values, "architectures": ["BertModel"]}))
    AutoModel.from_pretrained(tmp_path)
    code, out, err = run(tmp_path)
    assert (code, err) == (0, "")
    assert '"type": "shaw"' in out
