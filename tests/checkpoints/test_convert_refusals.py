"""What cannot be converted is refused with advice, and a failed conversion leaves nothing behind."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file, save_model
from transformers import AutoModelForCausalLM

import hf_posenc
from hf_posenc import PosEncError
from hf_posenc.checkpoints import convert, files, weights
from tests.checkpoints.stock_checkpoints import file_hashes, save_stock, update_json
from tests.support import tiny_models as tiny
from tests.support import word_level_tokenizer as word_level
from tests.support.sampling import combinations

STEPS = {
    "_link_or_copy": weights,
    "_rewrite": weights,
    "save_file": weights,
    "copyfile": shutil,
    "flush": files,
    "replace": Path,
}
"""Functions that are called on the way, and where they are looked up."""
FAILURES = {
    "interrupt": (KeyboardInterrupt(), KeyboardInterrupt, None),
    "disk-full": (OSError(28, "No space left on device"), PosEncError, "No space left"),
    "disk-full-in-safetensors": (
        SafetensorError("Error while serializing: I/O error: No space left on device"),
        PosEncError,
        "No space left",
    ),
    "input-output-error": (OSError(5, "Input/output error"), PosEncError, "Input/output error"),
}


@combinations(failure=list(FAILURES), name=list(STEPS), after=[False, True])
def test_failure_at_any_step_leaves_nothing_behind(
    failure: str, name: str, after: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (error, expected, match), owner = FAILURES[failure], STEPS[name]
    source = save_stock(tmp_path / "source", max_shard_size="20KB")
    (source / "tokenizer.json").write_text("{}")
    before, original = file_hashes(source), getattr(owner, name)

    def fail(*args: Any, **kwargs: Any) -> None:
        if after:
            original(*args, **kwargs)
        raise error

    monkeypatch.setattr(owner, name, fail)
    with pytest.raises(expected, match=match):
        hf_posenc.convert_checkpoint(source, "deberta", tmp_path / "a" / "b" / "out")
    assert file_hashes(source) == before
    complete = name == "replace" and after
    assert sorted(path.name for path in tmp_path.iterdir()) == (["a", "source"] if complete else ["source"])
    if complete:
        assert [path.name for path in (tmp_path / "a" / "b").iterdir()] == ["out"]
        AutoModelForCausalLM.from_pretrained(tmp_path / "a" / "b" / "out")


def _header_length(path: Path, length: int) -> None:
    path.write_bytes(length.to_bytes(8, "little") + path.read_bytes()[8:])


def _empty_tensor_of_absurd_shape(path: Path) -> None:
    entry = {"dtype": "F32", "shape": [0, 2**62, 2**62], "data_offsets": [0, 0]}
    header = json.dumps({"x": entry}).ljust(96).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header)


def _metadata(path: Path, metadata: object) -> None:
    content = path.read_bytes()
    size = int.from_bytes(content[:8], "little")
    header = json.dumps({**json.loads(content[8 : 8 + size]), "__metadata__": metadata}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + content[8 + size :])


DAMAGE: dict[str, Callable[[Path], Any]] = {
    "cut off": lambda path: path.write_bytes(path.read_bytes()[:-8]),
    "too long": lambda path: path.write_bytes(path.read_bytes() + b"12345678"),
    "scrambled header": lambda path: path.write_bytes(path.read_bytes()[:8] + b"\xff" * 64 + path.read_bytes()[72:]),
    "header larger than the file": lambda path: _header_length(path, 90_000_000),
    "header of an absurd size": lambda path: _header_length(path, 2**60),
    "deeply nested header": lambda path: path.write_bytes((10**5).to_bytes(8, "little") + b"[" * 10**5),
    "wrong offset": lambda path: path.write_bytes(
        path.read_bytes().replace(b'"data_offsets":[0,', b'"data_offsets":[1,', 1)
    ),
    "metadata of numbers": lambda path: _metadata(path, {"format": 1}),
    "metadata as a list": lambda path: _metadata(path, ["pt"]),
    "nested metadata": lambda path: _metadata(path, {"format": {"pt": "pt"}}),
    "absurd shape": _empty_tensor_of_absurd_shape,
    "missing": Path.unlink,
    "empty": lambda path: path.write_bytes(b""),
    "directory": lambda path: (path.unlink(), path.mkdir()),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_shard(damage: str, tmp_path: Path) -> None:
    source = save_stock(tmp_path / "source", max_shard_size="20KB")
    DAMAGE[damage](sorted(source.glob("*.safetensors"))[1])
    before = file_hashes(source)
    with pytest.raises(PosEncError, match="model-00002"):
        hf_posenc.convert_checkpoint(source, "rope", tmp_path / "out")
    assert file_hashes(source) == before
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_unsupported_sources_and_outputs(tmp_path: Path) -> None:
    def check(match: str, output_dir: str | Path = tmp_path / "out", scheme: Any = "rope") -> None:
        with pytest.raises(ValueError, match=match):
            hf_posenc.convert_checkpoint(source, scheme, output_dir)
        assert not (tmp_path / "out").exists()

    source: str | Path = save_stock(tmp_path / "source")
    assert isinstance(source, Path)
    for output_dir in (source / "out", source, tmp_path):
        check("overlaps", output_dir)
    check("rop", scheme="rop")
    (tmp_path / "file").write_text("x")
    check("is a file", tmp_path / "file")
    update_json(source / "config.json", model_type="t5")
    check("'t5'.*several stacks.*families.md")
    (source / "config.json").write_text("{")
    check("config.json.*not a valid JSON")
    (source / "config.json").unlink()
    check("no config.json")
    source = tmp_path / "nowhere"
    check("not a directory")
    source = "no-such-user/no-such-model"
    check("Hub.*no-such-user/no-such-model")
    source = save_stock(tmp_path / "pickled")
    (source / "model.safetensors").rename(source / "pytorch_model.bin")
    check("only safetensors")
    source = tmp_path / "variant"
    tiny.model("gpt2", "alibi").save_pretrained(source)
    check('already a variant.*"alibi"')


def test_wrong_index(tmp_path: Path) -> None:
    source = save_stock(tmp_path / "source", max_shard_size="20KB")
    index_path = source / "model.safetensors.index.json"
    index = json.loads(index_path.read_text())
    for weight_map, match in (
        ({**index["weight_map"], "more": index["weight_map"]["transformer.wte.weight"]}, "'more'"),
        ({**index["weight_map"], "x": "../x.safetensors"}, "outside"),
        ([], "not an index"),
    ):
        index_path.write_text(json.dumps({**index, "weight_map": weight_map}))
        with pytest.raises(PosEncError, match=match):
            hf_posenc.convert_checkpoint(source, "rope", tmp_path / "out")


def test_weights_of_another_model(tmp_path: Path) -> None:
    def check(match: str, source: Path, scheme: Any = "rope") -> None:
        with pytest.raises(PosEncError, match=match):
            hf_posenc.convert_checkpoint(source, scheme, tmp_path / "out")
        assert not (tmp_path / "out").exists()

    def save_with(name: str, changes: dict[str, torch.Tensor | None]) -> Path:
        source = save_stock(tmp_path / name)
        tensors = {**load_file(source / "model.safetensors"), **changes}
        tensors = {name: tensor for name, tensor in tensors.items() if tensor is not None}
        save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
        return source

    projection = "transformer.h.1.attn.c_attn.weight"
    check("missing.*h.1.attn.c_attn.weight", save_with("missing", {projection: None}))
    check(r"h.1.attn.c_attn.weight.*\(32, 95\)", save_with("narrow", {projection: torch.zeros(32, 95)}))
    short_table = save_with("short", {"transformer.wpe.weight": torch.zeros(40, 32)})
    check(r"wpe.weight.*\(40, 32\)", short_table, ["learned", "alibi"])
    source = save_stock(tmp_path / "heads")
    update_json(source / "config.json", n_head=3)
    check("config.json|divisible", source)
    source = save_stock(tmp_path / "index", max_shard_size="20KB")
    index_path = source / "model.safetensors.index.json"
    weight_map = json.loads(index_path.read_text())["weight_map"]
    last = max(weight_map.values())
    update_json(index_path, weight_map={name: file for name, file in weight_map.items() if file != last})
    check("missing", source)


@pytest.mark.parametrize(("field", "match"), [("n_embd", "has shape.*4096"), ("n_layer", "layers")])
def test_compares_sizes_with_the_files_before_building_schemes(
    field: str, match: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = save_stock(tmp_path / "source")
    update_json(source / "config.json", **{field: 4096 if field == "n_embd" else 64})
    monkeypatch.setattr(convert, "plan_schemes", lambda *args: pytest.fail("schemes were built first"))
    with pytest.raises(PosEncError, match=match):
        hf_posenc.convert_checkpoint(source, "deberta", tmp_path / "out")


@pytest.mark.parametrize("architecture", ["gpt2", "llama"])
def test_accepts_weights_that_transformers_loads(architecture: str, tmp_path: Path) -> None:
    """Tied weights stored under the head's name, a missing kernel, and a wrong table that is dropped anyway."""
    source = save_stock(tmp_path / "source", architecture)
    if architecture == "llama":
        tiny.model("llama", dtype=torch.float32, tie_word_embeddings=True).save_pretrained(source)
    model = AutoModelForCausalLM.from_pretrained(source)
    save_model(model, str(source / "model.safetensors"), metadata={"format": "pt"})
    assert not any("wte" in name or "embed_tokens" in name for name in load_file(source / "model.safetensors"))
    expected = AutoModelForCausalLM.from_pretrained(source, position_scheme="rope")
    update_json(source / "config.json", attn_implementation="flash_attention_2")
    if architecture == "gpt2":
        update_json(source / "config.json", n_positions=77)
    hf_posenc.convert_checkpoint(source, "rope", tmp_path / "out")
    update_json(tmp_path / "out" / "config.json", attn_implementation="sdpa")
    converted = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    with torch.no_grad():
        assert torch.equal(converted(tiny.tokens()).logits, expected(tiny.tokens()).logits)


def test_prefers_the_single_file_over_an_index(tmp_path: Path) -> None:
    """As transformers does if both exist."""
    source = save_stock(tmp_path / "source", max_shard_size="20KB")
    model: Any = tiny.model("gpt2", dtype=torch.float32, seed=5)
    save_file(dict(model.transformer.state_dict()), source / "model.safetensors", metadata={"format": "pt"})
    hf_posenc.convert_checkpoint(source, "none", tmp_path / "out")
    with torch.no_grad():
        converted = AutoModelForCausalLM.from_pretrained(tmp_path / "out")(tiny.tokens()).logits
        expected = AutoModelForCausalLM.from_pretrained(source, position_scheme="none")(tiny.tokens()).logits
    assert torch.equal(converted, expected)


def test_output_directories_that_cannot_be_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = save_stock(tmp_path / "source")
    for name in ("working_dir", "mounted"):
        (tmp_path / name).mkdir()
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    monkeypatch.chdir(tmp_path / "working_dir")
    monkeypatch.setattr(os.path, "ismount", lambda path: str(path).endswith("mounted"))
    for output_dir, match in (
        (".", "working directory"),
        (tmp_path / "loop", "cannot be written"),
        (tmp_path / ("x" * 300), "cannot be written"),
        ("~no-such-user/out", "cannot be written"),
        (tmp_path / "mounted", "mount"),
    ):
        for force in (False, True):
            with pytest.raises(PosEncError, match=match):
                hf_posenc.convert_checkpoint(source, "rope", output_dir, force=force)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["loop", "mounted", "source", "working_dir"]
    assert list((tmp_path / "working_dir").iterdir()) == []


@pytest.mark.parametrize("target", ["empty", "dangling", "full"])
def test_writes_through_a_symbolic_link(target: str, tmp_path: Path) -> None:
    source, link, directory = save_stock(tmp_path / "source"), tmp_path / "link", tmp_path / "directory"
    link.symlink_to(directory)
    if target != "dangling":
        directory.mkdir()
    if target == "full":
        (directory / "old").write_text("x")
    hf_posenc.convert_checkpoint(source, "rope", link, force=target == "full")
    assert link.is_symlink()
    assert not (directory / "old").exists()
    AutoModelForCausalLM.from_pretrained(link)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["directory", "link", "source"]


def test_keeps_files_that_another_process_writes_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, flush = save_stock(tmp_path / "source"), files.flush

    def flush_and_write(directory: Path) -> None:
        flush(directory)
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "theirs").write_text("x")

    monkeypatch.setattr(files, "flush", flush_and_write)
    with pytest.raises(PosEncError, match="Could not write"):
        hf_posenc.convert_checkpoint(source, "rope", tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["theirs"]


def test_failed_replacement_restores_the_old_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, replace = save_stock(tmp_path / "source"), Path.replace
    hf_posenc.convert_checkpoint(source, "rope", tmp_path / "out")
    before = file_hashes(tmp_path / "out")

    def fail_for_the_new_directory(path: Path, target: Path) -> Path:
        if path.name == ".out.partial":
            raise OSError(5, "Input/output error")
        return replace(path, target)

    monkeypatch.setattr(Path, "replace", fail_for_the_new_directory)
    with pytest.raises(PosEncError, match="Input/output error"):
        hf_posenc.convert_checkpoint(source, "alibi", tmp_path / "out", force=True)
    assert file_hashes(tmp_path / "out") == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "source"]


def test_variant_names_the_checkpoint_to_convert(tmp_path: Path) -> None:
    source = tmp_path / "variant"
    tiny.model("gpt2", "alibi").save_pretrained(source)
    update_json(source / "config.json", posenc_base_model="somebody/gpt2-small")
    with pytest.raises(PosEncError, match="somebody/gpt2-small"):
        hf_posenc.convert_checkpoint(source, "rope", tmp_path / "out")


def test_unknown_rotary_change(tmp_path: Path) -> None:
    source = save_stock(tmp_path / "source", "llama")
    with pytest.raises(PosEncError, match="'foo'.*interleaved_to_halves, halves_to_interleaved"):
        hf_posenc.convert_checkpoint(source, "rope", tmp_path / "out", rotary_weights="foo")  # type: ignore[arg-type]


@pytest.mark.parametrize(("content", "match"), [("", "no tokens"), (None, "Cannot read the text")])
def test_drift_text_that_cannot_be_used(content: str | None, match: str, tmp_path: Path) -> None:
    source = save_stock(tmp_path / "source")
    word_level.tokenizer().save_pretrained(source)
    if content is not None:
        (tmp_path / "text").write_text(content)
    with pytest.raises(PosEncError, match=match):
        hf_posenc.convert_checkpoint(source, "rope", tmp_path / "out", drift_text=tmp_path / "text")
    assert not (tmp_path / "out").exists()
