"""Checkpoints converted as files equal what loading and saving the model would give, and nothing is ever half there."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from cases import CASES, Case, pairs
from safetensors import safe_open
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForMaskedLM, GPT2Config, GPT2LMHeadModel

import hf_posenc
from hf_posenc.checkpoints import conversion
from hf_posenc.checkpoints.shards import CorruptShard, Shard

HEADS = {"bert": AutoModelForMaskedLM, "gpt2": AutoModelForCausalLM, "llama": AutoModelForCausalLM}


def hashes(directory: Path) -> dict[str, str]:
    files = [path for path in directory.rglob("*") if path.is_file()]
    return {str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def saved(directory: Path, architecture: str = "gpt2", shard: str = "5GB", dtype: torch.dtype = torch.float32) -> Path:
    tiny.model(architecture, dtype=dtype).save_pretrained(directory, max_shard_size=shard)
    return directory


@pairs(["bert", "gpt2", "llama"], CASES)
def test_it_gives_what_loading_with_the_scheme_gives(case: Case, architecture: str, tmp_path: Path) -> None:
    source = saved(tmp_path / "source", architecture, "20KB" if CASES.index(case) % 2 else "5GB")
    before = hashes(source)
    done = hf_posenc.convert_checkpoint(source, case.scheme, tmp_path / "out")
    assert hashes(source) == before
    auto, ids = HEADS[architecture], tiny.tokens()
    converted, report = auto.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(report[word] for word in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    expected = auto.from_pretrained(source, position_scheme=case.scheme)
    assert type(converted) is type(expected)
    assert converted.config.position_scheme == expected.config.position_scheme
    assert converted.config.architectures == [type(converted).__name__]
    names = {name for name, _ in converted.named_parameters()}
    assert set(done.added) == {name for name in names if "position_scheme" in name}
    assert set(done.added) <= names - set(done.dropped)
    assert names - set(done.kept) - set(done.added) <= set(converted._tied_weights_keys or [])
    with torch.no_grad():
        for name, parameter in expected.named_parameters():
            if "position_scheme" not in name:
                assert torch.equal(converted.get_parameter(name), parameter), name
        expected.load_state_dict(converted.state_dict())  # some schemes start at random
        assert torch.equal(converted(ids).logits, expected(ids).logits)


def test_shards_are_linked_unless_they_lose_a_tensor(tmp_path: Path) -> None:
    source = saved(tmp_path / "source", shard="20KB")
    done = hf_posenc.convert_checkpoint(source, "t5", tmp_path / "out")
    inodes = {path.stat().st_ino for path in source.glob("*.safetensors")}
    for name in done.linked:
        assert (tmp_path / "out" / name).stat().st_ino in inodes
    for name in done.rewritten:
        assert (tmp_path / "out" / name).stat().st_ino not in inodes
    assert len(done.linked) > len(done.rewritten)
    assert list(done.dropped) == ["transformer.wpe.weight"]
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    held = {}
    for path in (tmp_path / "out").glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            held.update(dict.fromkeys(file.keys(), path.name))
    assert index["weight_map"] == held


def test_links_that_cannot_be_made_are_copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = saved(tmp_path / "source")

    def refuse(*args: Any) -> None:
        raise OSError("another device")

    monkeypatch.setattr(os, "link", refuse)
    hf_posenc.convert_checkpoint(source, ["learned", "alibi"], tmp_path / "out")
    assert hashes(tmp_path / "out")["model.safetensors"] == hashes(source)["model.safetensors"]


def test_a_checkpoint_without_a_head_and_one_in_half_precision(tmp_path: Path) -> None:
    tiny.model("gpt2", dtype=torch.bfloat16).base_model.save_pretrained(tmp_path / "source")
    done = hf_posenc.convert_checkpoint(tmp_path / "source", "t5", tmp_path / "out")
    assert list(done.added) == ["position_scheme.0.table.weight"]
    model, report = AutoModel.from_pretrained(tmp_path / "out", dtype="auto", output_loading_info=True)
    assert not report["missing_keys"]
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}


def test_what_belongs_to_it_goes_along_and_other_weights_do_not(tmp_path: Path) -> None:
    source = saved(tmp_path / "source")
    for name in ("tokenizer.json", "vocab.json", "merges.txt", "chat_template.jinja"):
        (source / name).write_text("x")
    for name in ("pytorch_model.bin", "tf_model.h5", "training_args.bin", "optimizer.pt"):
        (source / name).write_text("x")
    hf_posenc.convert_checkpoint(source, "rope", tmp_path / "out")
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        *("tokenizer.json", "vocab.json", "merges.txt", "chat_template.jinja", "generation_config.json"),
        *("model.safetensors", "config.json", "modeling_hf_posenc.py"),
    }


def test_an_existing_directory_is_replaced_with_force_only(tmp_path: Path) -> None:
    source = saved(tmp_path / "source")
    hf_posenc.convert_checkpoint(source, "rope", tmp_path / "out")
    before = hashes(tmp_path / "out")
    with pytest.raises(ValueError, match="--force"):
        hf_posenc.convert_checkpoint(source, "alibi", tmp_path / "out")
    assert hashes(tmp_path / "out") == before
    hf_posenc.convert_checkpoint(source, "alibi", tmp_path / "out", force=True)
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").config.position_scheme == "alibi"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "source"]


def test_random_starts_are_those_of_the_seed(tmp_path: Path) -> None:
    source, scheme = saved(tmp_path / "source"), {"type": "t5", "init": "paper"}
    state = torch.get_rng_state()
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        hf_posenc.convert_checkpoint(source, scheme, tmp_path / name, seed=seed)
    assert torch.equal(torch.get_rng_state(), state)
    found = {name: hashes(tmp_path / name)["model-00002-of-00002.safetensors"] for name in "abc"}
    assert found["a"] == found["b"] != found["c"]


STEPS = [
    (Shard, "link_or_copy"),
    (Shard, "write"),
    (conversion, "save_file"),
    (conversion, "link_or_copy"),
    (conversion, "_flush"),
    (conversion, "_put_in_place"),
]


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(28, "No space left on device"), OSError(5, "I/O")])
@pytest.mark.parametrize(("holder", "name"), STEPS, ids=[name for _, name in STEPS])
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_whatever_happens_nothing_is_left_behind(
    holder: Any, name: str, after: bool, error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = saved(tmp_path / "source", shard="20KB")
    before, real = hashes(source), getattr(holder, name)

    def fails(*args: Any, **kwargs: Any) -> None:
        if after:
            real(*args, **kwargs)
        raise error

    monkeypatch.setattr(holder, name, fails)
    full = getattr(error, "errno", None) == 28
    with pytest.raises(ValueError if full else type(error), match="no space left" if full else None):
        hf_posenc.convert_checkpoint(source, "deberta", tmp_path / "out")
    assert hashes(source) == before
    complete = name == "_put_in_place" and after
    assert sorted(path.name for path in tmp_path.iterdir()) == (["out", "source"] if complete else ["source"])
    if complete:
        AutoModelForCausalLM.from_pretrained(tmp_path / "out")


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-8])


def lengthen(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"12345678")


def scramble(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:8] + b"\xff" * 64 + path.read_bytes()[72:])


def misplace(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content.replace(b'"data_offsets":[0,', b'"data_offsets":[1,', 1))


@pytest.mark.parametrize("damage", [cut, lengthen, scramble, misplace, Path.unlink, lambda path: path.write_bytes(b"")])
def test_damaged_shards_are_refused(damage: Any, tmp_path: Path) -> None:
    source = saved(tmp_path / "source", shard="20KB")
    damage(sorted(source.glob("*.safetensors"))[1])
    before = hashes(source)
    with pytest.raises(CorruptShard, match="model-00002"):
        hf_posenc.convert_checkpoint(source, "rope", tmp_path / "out")
    assert hashes(source) == before
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def rewrite(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_what_cannot_be_converted_is_refused_with_a_way_out(tmp_path: Path) -> None:
    def refused(match: str, out: str | Path = tmp_path / "out", scheme: Any = "rope") -> None:
        with pytest.raises(ValueError, match=match):
            hf_posenc.convert_checkpoint(source, scheme, out)
        assert not (tmp_path / "out").exists()

    source = saved(tmp_path / "source")
    refused("inside of the source", source / "out")
    refused("inside of the source", source)
    refused("inside of the source", tmp_path)
    refused("rope.*alibi|unknown|no scheme", scheme="rop")
    (tmp_path / "file").write_text("x")
    refused("is a file", tmp_path / "file")
    rewrite(source / "config.json", model_type="t5")
    refused("'t5' model.*bert.*gpt2.*llama")
    (source / "config.json").write_text("{")
    refused("no config of transformers")
    (source / "config.json").unlink()
    refused("no config.json")
    source = tmp_path / "nowhere"
    refused("is no directory")
    source = "no-such-user/no-such-model"
    refused("neither a directory here nor")
    source = saved(tmp_path / "pickled")
    (source / "model.safetensors").rename(source / "pytorch_model.bin")
    refused("only safetensors")
    source = tmp_path / "variant"
    tiny.model("gpt2", "alibi").save_pretrained(source)
    refused('variant already, with the position scheme "alibi"')


def test_an_index_that_lies_is_refused(tmp_path: Path) -> None:
    source = saved(tmp_path / "source", shard="20KB")
    index = source / "model.safetensors.index.json"
    good = json.loads(index.read_text())
    for weight_map, match in (
        ({**good["weight_map"], "more": good["weight_map"]["transformer.wte.weight"]}, "'more'"),
        ({**good["weight_map"], "x": "../x.safetensors"}, "outside of"),
        ([], "no index"),
    ):
        index.write_text(json.dumps({**good, "weight_map": weight_map}))
        with pytest.raises(CorruptShard, match=match):
            hf_posenc.convert_checkpoint(source, "rope", tmp_path / "out")


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "hf_posenc", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_command(tmp_path: Path) -> None:
    source = saved(tmp_path / "source")
    done = run("convert", str(source), "--scheme", '["learned", "t5"]', "--out", str(tmp_path / "out"), "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["position_scheme"] == ["learned", "t5"]
    AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    again = run("convert", str(source), "--scheme", "rope", "--out", str(tmp_path / "out"))
    assert (again.returncode, again.stdout) == (2, "")
    assert "--force" in again.stderr
    assert "Traceback" not in again.stderr


LARGE = """
import resource, sys, time
import hf_posenc, transformers
hf_posenc.convert_checkpoint
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
start = time.perf_counter()
hf_posenc.convert_checkpoint(sys.argv[1], "deberta", sys.argv[2])
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024, time.perf_counter() - start)
"""


@pytest.mark.parametrize("megabytes", [64, pytest.param(2048, marks=pytest.mark.full)])
def test_a_large_checkpoint_needs_little_memory(megabytes: int, tmp_path: Path) -> None:
    """Beyond what importing takes, less than a quarter of its size, or than 200 MB; the shard that is rewritten too."""
    layers = max(megabytes // 13, 1)
    config = GPT2Config(n_embd=512, n_head=8, n_layer=layers, vocab_size=1000, bos_token_id=1, eos_token_id=2)
    with torch.device("meta"):
        shapes = {name: tensor.shape for name, tensor in GPT2LMHeadModel(config).state_dict().items()}
    state = {name: torch.rand(shape) for name, shape in shapes.items() if name != "lm_head.weight"}
    source = tmp_path / "source"
    with torch.device("meta"):
        model = GPT2LMHeadModel(config)
    model.save_pretrained(source, state_dict=state, max_shard_size=f"{megabytes // 4}MB")
    del state
    size = sum(path.stat().st_size for path in source.glob("*.safetensors")) / 2**20
    assert size > 0.8 * megabytes
    done = subprocess.run(
        [sys.executable, "-c", LARGE, str(source), str(tmp_path / "out")], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    grown, _ = done.stdout.split()
    assert int(grown) < min(200, size / 4 + 60)
