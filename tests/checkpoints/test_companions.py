"""Code of a checkpoint's author and files outside of the checkpoint are never carried along."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import hf_posenc
from hf_posenc import PosEncError
from hf_posenc.cli import app
from tests.checkpoints.stock_checkpoints import file_hashes, save_stock, update_json
from tests.support import word_level_tokenizer as word_level
from tests.support.evidence import count_cases

FOREIGN = {"auto_map": {"AutoTokenizer": ["trap.Trap", None], "AutoProcessor": "modeling_hf_posenc.x--trap.Trap"}}
PIPELINES = {"custom_pipelines": {"trap": {"impl": "trap.Trap"}}}
CODE_FILES = ("tokenizer.py", "tokenizer_fast.PY", "vocab.so", "additional_chat_templates/run.py", "tokenizer.PKL")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return word_level.saved("gpt2", tmp_path / "source")


def test_code_of_the_author_stays_behind(source: Path, tmp_path: Path) -> None:
    (source / "additional_chat_templates").mkdir()
    for name in (*CODE_FILES, "trap.py"):
        (source / name).write_text("raise SystemExit('the code was run')")
    for name in ("tokenizer_config.json", "generation_config.json", "preprocessor_config.json", "config.json"):
        (source / name).write_text((source / name).read_text() if (source / name).exists() else "{}")
        update_json(source / name, **FOREIGN, **PIPELINES)
    before = file_hashes(source)
    done = CliRunner().invoke(app, ["convert", str(source), "--scheme", "rope", "--out", str(tmp_path / "out")])
    assert done.exit_code == 0, (done.output, done.exception)
    for expected in (*CODE_FILES, "trap.py", "auto_map in tokenizer_config.json", "custom_pipelines in config.json"):
        assert f"left out: {expected}" in done.output
    files = {str(path.relative_to(tmp_path / "out")): path for path in (tmp_path / "out").rglob("*") if path.is_file()}
    assert [name for name in files if not name.endswith((".json", ".safetensors"))] == ["modeling_hf_posenc.py"]
    for name, path in files.items():
        assert b"trap" not in path.read_bytes(), name
    assert "modeling_hf_posenc.PosEnc" in files["config.json"].read_text()
    assert json.loads(files["tokenizer_config.json"].read_text())["eos_token"] == "<last>", "other fields are kept"
    assert file_hashes(source) == before
    count_cases("hostile checkpoints", 1)


def test_nothing_is_left_out_of_a_plain_checkpoint(source: Path, tmp_path: Path) -> None:
    assert hf_posenc.convert_checkpoint(source, "rope", tmp_path / "out").left_out == ()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (source / name).read_bytes()


def link_out(path: Path, private: Path, linked: str = "file") -> None:
    """Replace a file of a checkpoint, or the directory that contains it, by a link to a private place."""
    target = private / path.name
    private.mkdir()
    if path.exists():
        path.rename(target)
    else:
        target.write_text("{}")
    if linked == "directory":
        path.parent.symlink_to(private)
    else:
        path.parent.mkdir(exist_ok=True)
        path.symlink_to(target)


@pytest.mark.parametrize(
    ("name", "linked"),
    [
        ("config.json", "file"),
        ("model.safetensors", "file"),
        ("model.safetensors.index.json", "file"),
        ("tokenizer_secret.txt", "file"),
        ("1_Pooling/config.json", "file"),
        ("1_Pooling/config.json", "directory"),
    ],
)
def test_links_out_of_the_checkpoint_are_refused(name: str, linked: str, source: Path, tmp_path: Path) -> None:
    hf_posenc.convert_checkpoint(source, "rope", tmp_path / "variant")
    link_out(source / name, tmp_path / "private", linked)
    with pytest.raises(PosEncError, match=f"{name} is a link to"):
        hf_posenc.convert_checkpoint(source, "rope", tmp_path / "out")
    link_out(tmp_path / "variant" / name, tmp_path / "also private", linked)
    with pytest.raises(PosEncError, match=f"{name} is a link to"):
        hf_posenc.export_checkpoint(tmp_path / "variant", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    count_cases("hostile checkpoints", 2)


def test_links_within_a_cached_repository_are_followed(tmp_path: Path) -> None:
    repo = tmp_path / "models--somebody--gpt2"
    source = save_stock(repo / "snapshots" / "0123")
    (repo / "blobs").mkdir()
    (source / "tokenizer.json").write_text("{}")
    for path in list(source.iterdir()):
        path.rename(repo / "blobs" / path.name)
        path.symlink_to(f"../../blobs/{path.name}")
    hf_posenc.convert_checkpoint(source, "rope", tmp_path / "out")
    assert not (tmp_path / "out" / "tokenizer.json").is_symlink()
    (tmp_path / "secret").write_text("{}")
    (source / "vocab.json").symlink_to(tmp_path / "secret")
    with pytest.raises(PosEncError, match=r"vocab\.json is a link to"):
        hf_posenc.convert_checkpoint(source, "rope", tmp_path / "again")


POOLING, TANH = "sentence_transformers.models.Pooling", "torch.nn.modules.activation.Tanh"


@pytest.mark.parametrize(
    ("name", "content", "is_refused"),
    [
        ("modules.json", [{"idx": 0, "path": "", "type": POOLING}], False),
        ("modules.json", [{"idx": 0, "path": "", "type": POOLING}, {"type": "trap.Trap"}], True),
        ("modules.json", [{"type": "sentence_transformers_trap.Trap"}], True),
        ("modules.json", [{"type": None}], True),
        ("modules.json", {"type": POOLING}, True),
        ("modules.json", ["x"], True),
        ("2_Dense/config.json", {"in_features": 32, "activation_function": TANH}, False),
        ("2_Dense/config.json", {"in_features": 32, "activation_function": "os.abort"}, True),
        ("2_Dense/config.json", {"activation_function": "torch.hub.load"}, True),
        ("sentence_bert_config.json", {"model_args": {"attn_implementation": "sdpa"}}, False),
        ("sentence_bert_config.json", {"model_args": {"attn_implementation": "evil/kernel"}}, True),
    ],
)
def test_foreign_code_in_files_of_sentence_transformers(
    name: str, content: Any, is_refused: bool, source: Path, tmp_path: Path
) -> None:
    (source / name).parent.mkdir(exist_ok=True)
    (source / name).write_text(json.dumps(content))
    if is_refused:
        with pytest.raises(PosEncError, match=f"(?i){name}.* remove"):
            hf_posenc.convert_checkpoint(source, "rope", tmp_path / "out")
        assert not (tmp_path / "out").exists()
        count_cases("hostile checkpoints", 1)
    else:
        hf_posenc.convert_checkpoint(source, "rope", tmp_path / "out")
        assert json.loads((tmp_path / "out" / name).read_text()) == content


def test_damaged_companion_is_named(source: Path, tmp_path: Path) -> None:
    (source / "tokenizer_config.json").write_text('{"a": ')
    with pytest.raises(PosEncError, match=r"tokenizer_config\.json is not a valid JSON"):
        hf_posenc.convert_checkpoint(source, "rope", tmp_path / "out")
