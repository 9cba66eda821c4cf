"""A converted checkpoint equals what loading with the scheme gives, at the cost of one shard of memory."""

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
from hf_posenc import PosEncError
from tests.checkpoints.stock_checkpoints import file_hashes, run_command, save_stock
from tests.support import tiny_models as tiny
from tests.support import word_level_tokenizer as word_level
from tests.support.cases import CASES, Case, pairs

AUTO_CLASSES = {"bert": AutoModelForMaskedLM, "gpt2": AutoModelForCausalLM, "llama": AutoModelForCausalLM}


@pairs(["bert", "gpt2", "llama"], CASES)
def test_equals_loading_with_the_scheme(case: Case, architecture: str, tmp_path: Path) -> None:
    max_shard_size = "20KB" if CASES.index(case) % 2 else "5GB"
    source = save_stock(tmp_path / "source", architecture, max_shard_size)
    before = file_hashes(source)
    conversion = hf_posenc.convert_checkpoint(source, case.scheme, tmp_path / "out")
    assert file_hashes(source) == before
    auto_class, ids = AUTO_CLASSES[architecture], tiny.tokens()
    converted, loading_info = auto_class.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(loading_info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    expected = auto_class.from_pretrained(source, position_scheme=case.scheme)
    assert type(converted) is type(expected)
    assert converted.config.position_scheme == expected.config.position_scheme
    assert converted.config.architectures == [type(converted).__name__]
    names = {name for name, _ in converted.named_parameters()}
    assert set(conversion.added) == {name for name in names if "position_scheme" in name}
    assert set(conversion.added) <= names - set(conversion.dropped)
    assert names - set(conversion.kept) - set(conversion.added) <= set(converted._tied_weights_keys or [])
    with torch.no_grad():
        for name, parameter in expected.named_parameters():
            if "position_scheme" not in name:
                assert torch.equal(converted.get_parameter(name), parameter), name
        expected.load_state_dict(converted.state_dict())  # some schemes have random initial values
        assert torch.equal(converted(ids).logits, expected(ids).logits)


def test_links_shards_that_do_not_change(tmp_path: Path) -> None:
    source = save_stock(tmp_path / "source", max_shard_size="20KB")
    conversion = hf_posenc.convert_checkpoint(source, "t5", tmp_path / "out")
    inodes = {path.stat().st_ino for path in source.glob("*.safetensors")}
    for name in conversion.linked_shards:
        assert (tmp_path / "out" / name).stat().st_ino in inodes
    for name in conversion.rewritten_shards:
        assert (tmp_path / "out" / name).stat().st_ino not in inodes
    assert len(conversion.linked_shards) > len(conversion.rewritten_shards)
    assert list(conversion.dropped) == ["transformer.wpe.weight"]
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    stored, total_size = {}, 0
    for path in (tmp_path / "out").glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            stored.update(dict.fromkeys(file.keys(), path.name))
            total_size += sum(file.get_tensor(name).nbytes for name in file.keys())  # noqa: SIM118
    assert index == {"metadata": {"total_size": total_size}, "weight_map": stored}


def test_copies_shards_that_cannot_be_linked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = save_stock(tmp_path / "source")

    def refuse_link(*args: Any) -> None:
        raise OSError("another device")

    monkeypatch.setattr(os, "link", refuse_link)
    hf_posenc.convert_checkpoint(source, ["learned", "alibi"], tmp_path / "out")
    assert file_hashes(tmp_path / "out")["model.safetensors"] == file_hashes(source)["model.safetensors"]


def test_checkpoint_without_head_in_half_precision(tmp_path: Path) -> None:
    tiny.model("gpt2", dtype=torch.bfloat16).base_model.save_pretrained(tmp_path / "source")
    conversion = hf_posenc.convert_checkpoint(tmp_path / "source", "t5", tmp_path / "out")
    assert list(conversion.added) == ["position_scheme.0.table.weight"]
    model, loading_info = AutoModel.from_pretrained(tmp_path / "out", dtype="auto", output_loading_info=True)
    assert not loading_info["missing_keys"]
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}


def test_copies_companion_files_but_no_other_weights(tmp_path: Path) -> None:
    source = save_stock(tmp_path / "source")
    for name in ("tokenizer.json", "vocab.json", "merges.txt", "chat_template.jinja"):
        (source / name).write_text("x")
    for name in ("pytorch_model.bin", "tf_model.h5", "training_args.bin", "optimizer.pt", "tokenizer.pkl"):
        (source / name).write_text("x")
    hf_posenc.convert_checkpoint(source, "rope", tmp_path / "out")
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        *("tokenizer.json", "vocab.json", "merges.txt", "chat_template.jinja", "generation_config.json"),
        *("model.safetensors", "config.json", "modeling_hf_posenc.py"),
    }


def test_copies_sentence_transformers_files(tmp_path: Path) -> None:
    source = save_stock(tmp_path / "source", "bert")
    (source / "1_Pooling").mkdir()
    names = ["modules.json", "config_sentence_transformers.json", "1_Pooling/config.json"]
    for name in names:
        (source / name).write_text("[]" if name == "modules.json" else "{}")
    (source / "1_Pooling" / "pytorch_model.bin").write_text("x")
    hf_posenc.convert_checkpoint(source, "rope", tmp_path / "out")
    assert [name for name in names if not (tmp_path / "out" / name).is_file()] == []
    assert not (tmp_path / "out" / "1_Pooling" / "pytorch_model.bin").exists()


def test_saving_over_the_output_does_not_change_the_source(tmp_path: Path) -> None:
    """Shards are hard links to the source's, so saving must replace them instead of writing into them."""
    source = save_stock(tmp_path / "source", "llama")
    word_level.tokenizer().save_pretrained(source)
    before = file_hashes(source)
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
    assert file_hashes(source) == before


def test_replaces_an_existing_directory_only_with_force(tmp_path: Path) -> None:
    source = save_stock(tmp_path / "source")
    hf_posenc.convert_checkpoint(source, "rope", tmp_path / "out")
    before = file_hashes(tmp_path / "out")
    with pytest.raises(PosEncError, match="--force"):
        hf_posenc.convert_checkpoint(source, "alibi", tmp_path / "out")
    assert file_hashes(tmp_path / "out") == before
    hf_posenc.convert_checkpoint(source, "alibi", tmp_path / "out", force=True)
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").config.position_scheme == "alibi"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "source"]


def test_seed_determines_random_initial_values(tmp_path: Path) -> None:
    source, scheme = save_stock(tmp_path / "source"), {"type": "t5", "init": "paper"}
    rng_state = torch.get_rng_state()
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        hf_posenc.convert_checkpoint(source, scheme, tmp_path / name, seed=seed)
    assert torch.equal(torch.get_rng_state(), rng_state)
    hashes = {name: file_hashes(tmp_path / name)["model-00002-of-00002.safetensors"] for name in "abc"}
    assert hashes["a"] == hashes["b"] != hashes["c"]


@pytest.mark.slow
def test_command(tmp_path: Path) -> None:
    source = save_stock(tmp_path / "source")
    done = run_command(
        "convert", str(source), "--scheme", '["learned", "t5"]', "--out", str(tmp_path / "out"), "--json"
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["position_scheme"] == ["learned", "t5"]
    AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    again = run_command("convert", str(source), "--scheme", "rope", "--out", str(tmp_path / "out"))
    assert (again.returncode, again.stdout) == (2, "")
    assert "--force" in again.stderr
    assert "Traceback" not in again.stderr


MEASURE_MEMORY = """
import sys
import hf_posenc, transformers
hf_posenc.convert_checkpoint

def peak():
    status = open("/proc/self/status").read()
    return int(status.split("VmHWM:")[1].split()[0]) // 1024

before = peak()
{work}
print(peak() - before)
"""
CONVERT = "hf_posenc.convert_checkpoint(sys.argv[1], 'deberta', sys.argv[2])"
LOAD_ALL = """
from safetensors.torch import load_file
from pathlib import Path
tensors = [tensor.clone() for path in Path(sys.argv[1]).glob("*.safetensors") for tensor in load_file(path).values()]
"""


def _memory_growth(work: str, source: Path, output_dir: Path) -> int:
    """Megabytes by which a new process grows, after imports. (`ru_maxrss` would inherit the peak of this one.)"""
    command = [sys.executable, "-c", MEASURE_MEMORY.format(work=work), str(source), str(output_dir)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peak memory is read from /proc")
@pytest.mark.slow
@pytest.mark.parametrize("megabytes", [192, 2048])
def test_holds_at_most_one_shard_in_memory(megabytes: int, tmp_path: Path) -> None:
    """The position table is in the first of eight shards, which is rewritten."""
    config = GPT2Config(n_embd=512, n_head=8, n_layer=megabytes // 13, vocab_size=1000, bos_token_id=1, eos_token_id=2)
    with torch.device("meta"):
        model = GPT2LMHeadModel(config)
    state = {name: torch.rand(tensor.shape) for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    source = tmp_path / "source"
    model.save_pretrained(source, state_dict=state, max_shard_size=f"{megabytes // 8}MB")
    del state
    size = sum(path.stat().st_size for path in source.glob("*.safetensors")) / 2**20
    assert size > 0.8 * megabytes
    limit = megabytes // 8 + 80
    assert _memory_growth(CONVERT, source, tmp_path / "out") < limit
    assert _memory_growth(LOAD_ALL, source, tmp_path / "out") > limit
