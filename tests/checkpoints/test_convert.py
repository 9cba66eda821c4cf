"""Checkpoints converted as files equal what loading and saving the model would give."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
)

import hf_posenc
from tests.support import tiny_models as tiny
from tests.support import word_level_tokenizer as word_level
from tests.support.cases import CASES, Case, pairs
from tests.support.conversion import hashes, run, saved

HEADS = {"bert": AutoModelForMaskedLM, "gpt2": AutoModelForCausalLM, "llama": AutoModelForCausalLM}


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


def test_saving_over_the_output_leaves_the_source_alone(tmp_path: Path) -> None:
    """Shards are links to the source's: whoever saves to them must not write through."""
    source = saved(tmp_path / "source", "llama")
    word_level.tokenizer().save_pretrained(source)
    before = hashes(source)
    hf_posenc.convert_checkpoint(source, "alibi", tmp_path / "out")
    assert os.path.samefile(source / "model.safetensors", tmp_path / "out" / "model.safetensors")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    with torch.no_grad():
        model.lm_head.weight.add_(1)
    model.generation_config.max_new_tokens = 7
    model.save_pretrained(tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    tokenizer.add_tokens(["more"])
    tokenizer.save_pretrained(tmp_path / "out")
    assert hashes(source) == before


@pytest.mark.parametrize("architecture", HEADS)
def test_a_handover_is_converted_with_its_step(architecture: str, tmp_path: Path) -> None:
    source = saved(tmp_path / "source", architecture, dtype=torch.bfloat16)
    scheme = {"type": "t5", "handover": {"from": "stock", "steps": 4}}
    hf_posenc.convert_checkpoint(source, scheme, tmp_path / "out")
    auto, ids = HEADS[architecture], tiny.tokens()
    model, report = auto.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(report[word] for word in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    with torch.no_grad():
        assert torch.equal(model(ids).logits, auto.from_pretrained(source)(ids).logits)
    assert run("inspect", str(tmp_path / "out")).returncode == 0


def test_sentence_transformers_files_go_along(tmp_path: Path) -> None:
    source = saved(tmp_path / "source", "bert")
    (source / "1_Pooling").mkdir()
    names = ["modules.json", "config_sentence_transformers.json", "1_Pooling/config.json"]
    for name in names:
        (source / name).write_text("{}")
    (source / "1_Pooling" / "pytorch_model.bin").write_text("x")
    hf_posenc.convert_checkpoint(source, "rope", tmp_path / "out")
    assert [name for name in names if not (tmp_path / "out" / name).is_file()] == []
    assert not (tmp_path / "out" / "1_Pooling" / "pytorch_model.bin").exists()


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


@pytest.mark.parametrize("megabytes", [64, pytest.param(2048, marks=pytest.mark.slow)])
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
