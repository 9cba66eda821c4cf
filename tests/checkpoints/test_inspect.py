"""`hf-posenc inspect` describes a checkpoint and finds damage without loading weights."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModel, BertConfig, BertModel
from typer.testing import CliRunner

import hf_posenc
from hf_posenc.checkpoints import source, write_manifest
from hf_posenc.cli import app
from tests.checkpoints.stock_checkpoints import update_json
from tests.support import tiny_models as tiny
from tests.support import word_level_tokenizer as word_level
from tests.support.cases import CASES, Case, pairs

T5 = {"type": "t5", "shared": False, "num_buckets": 8, "max_distance": 20}


def save_variant(directory: Path, architecture: str = "gpt2", scheme: Any = T5, **options: Any) -> Path:
    tiny.model(architecture, scheme, torch.float32).save_pretrained(directory, **options)
    return directory


def inspect(*arguments: Any) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["inspect", *map(str, arguments)])
    return result.exit_code, result.stdout, result.stderr


@pairs(["bert", "gpt2", "llama"], CASES)
def test_agrees_with_the_loaded_model(
    case: Case, architecture: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tiny.model(architecture, case.scheme, torch.float32)
    model.save_pretrained(tmp_path)
    inspection = hf_posenc.inspect_checkpoint(tmp_path)
    assert (inspection.problems, inspection.warnings, inspection.kind) == ([], [], "variant")
    assert inspection.position_scheme == case.scheme
    assert inspection.architecture == type(model).__name__
    assert inspection.explanation == hf_posenc.explain(model)
    assert inspection.num_parameters == sum(parameter.numel() for parameter in model.parameters())
    scheme_parameters = [parameter for name, parameter in model.named_parameters() if "position_scheme" in name]
    assert inspection.num_scheme_parameters == sum(parameter.numel() for parameter in scheme_parameters)


@pytest.mark.parametrize("architecture", ["bert", "gpt2", "llama"])
@pytest.mark.parametrize("with_head", [False, True])
def test_stock_checkpoint(architecture: str, with_head: bool, tmp_path: Path) -> None:
    model = tiny.model(architecture, None, torch.float32)
    saved: Any = model if with_head else model.base_model
    saved.save_pretrained(tmp_path)
    code, out, _ = inspect(tmp_path)
    assert code == 0
    assert ": stock\n" in out
    assert type(saved).__name__ in out
    assert "0 in the scheme" in out


def test_text_and_json(tmp_path: Path) -> None:
    directory = save_variant(tmp_path / "variant", max_shard_size="60KB")
    update_json(directory / "config.json", posenc_base_model="openai-community/gpt2")
    code, out, err = inspect(directory)
    assert (code, err) == (0, "")
    for words in ('"num_buckets": 8', "openai-community/gpt2", "layers 0 to 2: t5: score", "96 in the scheme"):
        assert words in out
    code, out, _ = inspect(directory, "--json")
    values = json.loads(out)
    assert code == 0
    assert values["intact"]
    assert values["position_scheme"] == T5
    assert len(values["shards"]) > 1
    assert len(values["explanation"]["layers"]) == tiny.LAYERS


def _cut_weights(directory: Path) -> None:
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-10])


def _drop_tensors(substring: str) -> Callable[[Path], None]:
    def drop(directory: Path) -> None:
        path = directory / "model.safetensors"
        kept = {name: value for name, value in load_file(path).items() if substring not in name}
        save_file(kept, path, metadata={"format": "pt"})

    return drop


def _update_config(**changes: Any) -> Callable[[Path], None]:
    return lambda directory: update_json(directory / "config.json", **changes)


DAMAGE: dict[str, Callable[[Path], Any]] = {
    "model.safetensors.*incomplete": _cut_weights,
    "missing.*position_scheme": _drop_tensors("position_scheme"),
    "missing.*ln_f": _drop_tensors("ln_f"),
    "3 layers.*2": _drop_tensors("h.2."),
    "pytorch_model.bin, a pickle": lambda directory: (directory / "model.safetensors").rename(
        directory / "pytorch_model.bin"
    ),
    r"has shape.*\(99, 32\)": _update_config(vocab_size=99),
    "config.json.*not a valid JSON": lambda directory: (directory / "config.json").write_text("{"),
    "architecture.*'os'": _update_config(architectures=["os"]),
    "num_buckets": _update_config(position_scheme={**T5, "num_buckets": -1}),
    "neither config.json nor run.json": lambda directory: (directory / "config.json").unlink(),
    "not a directory": shutil.rmtree,
}


@pytest.mark.parametrize("match", DAMAGE)
def test_damage_is_reported_with_exit_code_2(match: str, tmp_path: Path) -> None:
    directory = save_variant(tmp_path / "variant")
    assert inspect(directory)[0] == 0
    DAMAGE[match](directory)
    code, _, err = inspect(directory)
    assert code == 2
    assert err.startswith("error: ")
    assert re.search(match, err.replace("\n", " ")), err


def test_missing_shard(tmp_path: Path) -> None:
    directory = save_variant(tmp_path, max_shard_size="60KB")
    sorted(directory.glob("*.safetensors"))[0].unlink()
    code, out, err = inspect(directory, "--json")
    assert code == 2
    assert "is missing" in err
    assert json.loads(out)["problems"]
    assert not json.loads(out)["intact"]


def test_unexpected_tensors_and_pickles_are_warnings(tmp_path: Path) -> None:
    directory = save_variant(tmp_path)
    path = directory / "model.safetensors"
    save_file({**load_file(path), "stray": torch.zeros(3)}, path, metadata={"format": "pt"})
    (directory / "old").mkdir()
    (directory / "old" / "optimizer.pt").write_bytes(b"\x80\x04")
    code, out, _ = inspect(directory)
    assert code == 0
    assert re.search("warning: .*'stray'", out)
    assert re.search("warning: old/optimizer.pt.*pickle", out)


class HeaderOnly:
    """`safe_open` without access to tensor data."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.context = safe_open(*args, **kwargs)

    def __enter__(self) -> HeaderOnly:
        self.file = self.context.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self.context.__exit__(*error)

    def keys(self) -> list[str]:
        return self.file.keys()

    def metadata(self) -> dict[str, str]:
        return self.file.metadata()

    def get_slice(self, name: str) -> Any:
        class Slice:
            get_shape, get_dtype = self.file.get_slice(name).get_shape, self.file.get_slice(name).get_dtype

        return Slice

    def get_tensor(self, name: str) -> None:
        pytest.fail("weights were read")


def test_neither_reads_nor_allocates_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = save_variant(tmp_path)
    monkeypatch.setattr(source, "safe_open", HeaderOnly)
    for name in ("safetensors.safe_open", "torch.load", "safetensors.torch.load_file"):
        monkeypatch.setattr(name, lambda *_, **__: pytest.fail("weights were read"))
    on_meta: list[bool] = []
    normal_ = torch.Tensor.normal_

    def recorded_normal_(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        on_meta.append(self.is_meta)
        return normal_(self, *args, **kwargs)

    monkeypatch.setattr(torch.Tensor, "normal_", recorded_normal_)
    code, out, err = inspect(directory)
    assert code == 0, err
    assert "model.safetensors" in out
    assert all(on_meta)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output directory of a short run with two checkpoints."""
    home = tmp_path_factory.mktemp("run")
    source = word_level.saved("gpt2", home / "model")
    (home / "text.txt").write_text(word_level.text(2000))
    command = ["train", "--model", source, "--scheme", "alibi", "--data", home / "text.txt", "--train-length", 16]
    command += ["--output-dir", home / "out", "--recipe", "naive", "--max-steps", 4, "--save-steps", 2]
    command += ["--per-device-train-batch-size", 2, "--report-to", "none", "--use-cpu", "--disable-tqdm", "true"]
    result = CliRunner().invoke(app, list(map(str, command)))
    assert result.exit_code == 0, result.output
    return home / "out"


@pytest.fixture
def run_dir(trained: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained, tmp_path / "out"))


def test_finished_run(run_dir: Path) -> None:
    code, out, _ = inspect(run_dir)
    assert code == 0
    assert re.search("run +finished; .*checkpoint-4", out)
    assert "layers 0 to 2: alibi: score" in out
    code, out, _ = inspect(run_dir / "checkpoint-2", "--json")
    values = json.loads(out)
    assert (code, values["manifest_verified"], values["kind"]) == (0, True, "variant")


def test_unfinished_run(run_dir: Path) -> None:
    for path in run_dir.glob("*.safetensors"):
        path.unlink()
    (run_dir / "config.json").unlink()
    update_json(run_dir / "run.json", finished=False)
    code, out, _ = inspect(run_dir)
    assert code == 0
    assert re.search("run +not finished; .*checkpoint-4", out)
    weights = run_dir / "checkpoint-4" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x01")
    code, out, err = inspect(run_dir, "--json")
    assert code == 2
    assert json.loads(out)["run"]["latest_valid_checkpoint"] == "checkpoint-2"
    assert "checkpoint-4: model.safetensors does not match its checksum" in err
    code, _, err = inspect(run_dir / "checkpoint-4")
    assert code == 2
    assert "checksum" in err
    (run_dir / "checkpoint-4" / "manifest.json").unlink()
    write_manifest(run_dir / "checkpoint-4")
    assert inspect(run_dir)[0] == 0


def test_invalid_run_state(run_dir: Path) -> None:
    (run_dir / "run.json").write_text("[" * 50_000)
    code, _, err = inspect(run_dir)
    assert code == 2
    assert "run.json" in err


def test_relative_bert_of_transformers_4(tmp_path: Path) -> None:
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
    code, out, err = inspect(tmp_path)
    assert (code, err) == (0, "")
    assert '"type": "shaw"' in out
