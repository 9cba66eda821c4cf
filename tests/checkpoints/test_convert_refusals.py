"""What cannot be converted is refused with a way out, and whatever happens, nothing is ever half there."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file, save_model
from transformers import AutoModelForCausalLM

import hf_posenc
from hf_posenc.checkpoints import atomic as appearing
from hf_posenc.checkpoints import convert as conversion
from hf_posenc.checkpoints.shards import CorruptShard, Shard
from tests.support import tiny_models as tiny
from tests.support import word_level_tokenizer as word_level
from tests.support.conversion import hashes, saved

STEPS = [
    (Shard, "link_or_copy"),
    (Shard, "write"),
    (conversion, "save_file"),
    (shutil, "copyfile"),
    (appearing, "_flush"),
    (appearing, "_put_in_place"),
]


ERRORS = [
    (KeyboardInterrupt(), KeyboardInterrupt, None),
    (OSError(28, "No space left on device"), ValueError, "no space left"),
    (SafetensorError("Error while serializing: I/O error: No space left on device"), ValueError, "no space left"),
    (OSError(5, "Input/output error"), ValueError, "nothing of it is left: .*Input/output error"),
]


@pytest.mark.parametrize(("error", "expected", "match"), ERRORS, ids=["interrupt", "full", "full tensors", "broken"])
@pytest.mark.parametrize(("holder", "name"), STEPS, ids=[name for _, name in STEPS])
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_whatever_happens_nothing_is_left_behind(
    holder: Any,
    name: str,
    after: bool,
    error: BaseException,
    expected: type[BaseException],
    match: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source = saved(tmp_path / "source", shard="20KB")
    (source / "tokenizer.json").write_text("{}")
    before, real = hashes(source), getattr(holder, name)

    def fails(*args: Any, **kwargs: Any) -> None:
        if after:
            real(*args, **kwargs)
        raise error

    monkeypatch.setattr(holder, name, fails)
    with pytest.raises(expected, match=match):
        hf_posenc.convert_checkpoint(source, "deberta", tmp_path / "a" / "b" / "out")
    assert hashes(source) == before
    complete = name == "_put_in_place" and after
    assert sorted(path.name for path in tmp_path.iterdir()) == (["a", "source"] if complete else ["source"])
    if complete:
        assert [path.name for path in (tmp_path / "a" / "b").iterdir()] == ["out"]
        AutoModelForCausalLM.from_pretrained(tmp_path / "a" / "b" / "out")


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


def test_weights_of_another_model_are_refused(tmp_path: Path) -> None:
    def refused(match: str, source: Path, scheme: Any = "rope") -> None:
        with pytest.raises(ValueError, match=match):
            hf_posenc.convert_checkpoint(source, scheme, tmp_path / "out")
        assert not (tmp_path / "out").exists()

    def with_weights(name: str, change: Any) -> Path:
        source = saved(tmp_path / name)
        tensors = load_file(source / "model.safetensors")
        change(tensors)
        save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
        return source

    lost = "transformer.h.1.attn.c_attn.weight"
    refused("missing.*h.1.attn.c_attn.weight", with_weights("lost", lambda tensors: tensors.pop(lost)))
    shorter = {lost: torch.zeros(32, 95)}
    refused(
        r"h.1.attn.c_attn.weight is of shape \(32, 95\)", with_weights("odd", lambda tensors: tensors.update(shorter))
    )
    table = {"transformer.wpe.weight": torch.zeros(40, 32)}
    source = with_weights("short", lambda tensors: tensors.update(table))
    refused(r"wpe.weight is of shape \(40, 32\)", source, ["learned", "alibi"])
    source = saved(tmp_path / "heads")
    rewrite(source / "config.json", n_head=3)
    refused("no model|divisible", source)
    source = saved(tmp_path / "index", shard="20KB")
    index = source / "model.safetensors.index.json"
    weight_map = json.loads(index.read_text())["weight_map"]
    last = max(weight_map.values())
    rewrite(index, weight_map={name: file for name, file in weight_map.items() if file != last})
    refused("missing", source)


@pytest.mark.parametrize(("field", "match"), [("n_embd", "no tensor of the weights"), ("n_layer", "config.json is of")])
def test_sizes_that_the_files_do_not_bear_out_take_no_memory(
    field: str, match: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = saved(tmp_path / "source")
    rewrite(source / "config.json", **{field: 4096 if field == "n_embd" else 64})
    monkeypatch.setattr(conversion, "plan", lambda *args: pytest.fail("schemes were built before sizes were compared"))
    with pytest.raises(ValueError, match=match):
        hf_posenc.convert_checkpoint(source, "deberta", tmp_path / "out")


@pytest.mark.parametrize("architecture", ["gpt2", "llama"])
def test_weights_that_transformers_would_load_are_converted(architecture: str, tmp_path: Path) -> None:
    """Of tied weights, under the head's name only; of a kernel that is not here; of a table that is dropped anyway."""
    source = saved(tmp_path / "source", architecture)
    if architecture == "llama":
        tiny.model("llama", dtype=torch.float32, tie_word_embeddings=True).save_pretrained(source)
    model = AutoModelForCausalLM.from_pretrained(source)
    save_model(model, str(source / "model.safetensors"), metadata={"format": "pt"})
    assert not any("wte" in name or "embed_tokens" in name for name in load_file(source / "model.safetensors"))
    expected = AutoModelForCausalLM.from_pretrained(source, position_scheme="rope")
    rewrite(source / "config.json", attn_implementation="flash_attention_2")
    if architecture == "gpt2":
        rewrite(source / "config.json", n_positions=77)
    hf_posenc.convert_checkpoint(source, "rope", tmp_path / "out")
    rewrite(tmp_path / "out" / "config.json", attn_implementation="sdpa")
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    with torch.no_grad():
        assert torch.equal(found(tiny.tokens()).logits, expected(tiny.tokens()).logits)


def test_the_file_that_transformers_would_load_is_converted(tmp_path: Path) -> None:
    """Of a single file and an index, left by two ways of saving, it is the file."""
    source = saved(tmp_path / "source", shard="20KB")
    model = tiny.model("gpt2", dtype=torch.float32, seed=5)
    save_file(dict(model.transformer.state_dict()), source / "model.safetensors", metadata={"format": "pt"})
    hf_posenc.convert_checkpoint(source, "none", tmp_path / "out")
    with torch.no_grad():
        found, known = (
            AutoModelForCausalLM.from_pretrained(path, **scheme)(tiny.tokens()).logits
            for path, scheme in ((tmp_path / "out", {}), (source, {"position_scheme": "none"}))
        )
    assert torch.equal(found, known)


def test_places_that_cannot_be_taken_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = saved(tmp_path / "source")
    (tmp_path / "here").mkdir()
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setattr(os.path, "ismount", lambda path: str(path).endswith("mounted"))
    (tmp_path / "mounted").mkdir()
    for out, match in (
        (".", "that you are in"),
        (tmp_path / "loop", "cannot be written"),
        (tmp_path / ("x" * 300), "cannot be written"),
        ("~no-such-user/out", "cannot be written"),
        (tmp_path / "mounted", "mounted"),
    ):
        for force in (False, True):
            with pytest.raises(ValueError, match=match):
                hf_posenc.convert_checkpoint(source, "rope", out, force=force)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["here", "loop", "mounted", "source"]
    assert list((tmp_path / "here").iterdir()) == []


@pytest.mark.parametrize("kind", ["empty", "dangling", "full"])
def test_a_link_stays_and_what_it_names_is_written(kind: str, tmp_path: Path) -> None:
    source, link, real = saved(tmp_path / "source"), tmp_path / "link", tmp_path / "real"
    link.symlink_to(real)
    if kind != "dangling":
        real.mkdir()
    if kind == "full":
        (real / "old").write_text("x")
    hf_posenc.convert_checkpoint(source, "rope", link, force=kind == "full")
    assert link.is_symlink()
    assert not (real / "old").exists()
    AutoModelForCausalLM.from_pretrained(link)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "real", "source"]


def test_what_fills_meanwhile_is_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, flush = saved(tmp_path / "source"), appearing._flush

    def somebody_else(directory: Path) -> None:
        flush(directory)
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "theirs").write_text("x")

    monkeypatch.setattr(appearing, "_flush", somebody_else)
    with pytest.raises(ValueError, match="could not be written"):
        hf_posenc.convert_checkpoint(source, "rope", tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["theirs"]


def test_files_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    source = saved(tmp_path / "source", shard="20KB")
    shard = sorted(source.glob("*.safetensors"))[1]
    shard.unlink()
    shard.mkdir()
    with pytest.raises(ValueError, match="cannot be read.*Is a directory"):
        hf_posenc.convert_checkpoint(source, "rope", tmp_path / "out")


def test_a_variant_names_what_it_was_made_from(tmp_path: Path) -> None:
    source = tmp_path / "variant"
    tiny.model("gpt2", "alibi").save_pretrained(source)
    rewrite(source / "config.json", posenc_base_model="somebody/gpt2-small")
    with pytest.raises(ValueError, match="Convert 'somebody/gpt2-small'"):
        hf_posenc.convert_checkpoint(source, "rope", tmp_path / "out")


def test_an_order_of_features_that_is_none(tmp_path: Path) -> None:
    source = saved(tmp_path / "source", "llama")
    with pytest.raises(ValueError, match="one of interleaved_to_halves, halves_to_interleaved; got 'foo'"):
        hf_posenc.convert_checkpoint(source, "rope", tmp_path / "out", rotary_weights="foo")  # type: ignore[arg-type]


@pytest.mark.parametrize(("content", "match"), [("", "no tokens"), (None, "drift cannot be measured")])
def test_a_drift_that_cannot_be_measured(content: str | None, match: str, tmp_path: Path) -> None:
    source = saved(tmp_path / "source")
    word_level.tokenizer().save_pretrained(source)
    if content is not None:
        (tmp_path / "text").write_text(content)
    with pytest.raises(ValueError, match=match):
        hf_posenc.convert_checkpoint(source, "rope", tmp_path / "out", measure=tmp_path / "text")
    assert not (tmp_path / "out").exists()
