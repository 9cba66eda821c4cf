"""A run refuses files that lead out of its checkpoints before it trains, and leaves code of their author behind."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from hf_posenc import PosEncError
from hf_posenc.training import train
from tests.checkpoints.stock_checkpoints import update_json
from tests.support import word_level_tokenizer as word_level
from tests.support.evidence import count_cases
from tests.support.training_runs import request, settings

pytest.importorskip("datasets", reason="the extra `train` is not installed")
TRAP = {"auto_map": {"AutoTokenizer": ["trap.Trap", None]}, "custom_pipelines": {"trap": {"impl": "trap.Trap"}}}
POOLING = [{"idx": 0, "path": "", "type": "sentence_transformers.models.Pooling"}]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    (tmp_path / "text.txt").write_text(word_level.text(200))
    return word_level.saved("gpt2", tmp_path / "source")


def run(source: Path, scheme: str | None = "alibi", teacher: Path | None = None, out: str = "out") -> Path:
    options = {"scheme": scheme, "teacher_model": None if teacher is None else str(teacher)}
    arguments = settings(source.parent / out, max_steps=2, save_steps=1, save_total_limit=None)
    return train(request(source, source.parent / "text.txt", **options), arguments)


def test_code_of_the_author_stays_behind(
    source: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("hf_posenc"), "propagate", True)
    for name in ("config.json", "tokenizer_config.json", "generation_config.json"):
        update_json(source / name, **TRAP)
    (source / "trap.py").write_text("raise SystemExit('the code was run')")
    (source / "modules.json").write_text(json.dumps(POOLING))
    out = run(source)
    for expected in ("custom_pipelines in config.json", "auto_map in tokenizer_config.json", "trap.py"):
        assert expected in caplog.text
    files = [path for path in out.rglob("*") if path.suffix in (".json", ".py", ".jinja")]
    assert {path.name for path in (out / "checkpoint-1").iterdir()} >= {"config.json", "tokenizer_config.json"}
    assert [path for path in files if "trap" in path.read_text()] == []
    assert json.loads((out / "tokenizer_config.json").read_text())["eos_token"] == "<last>", "other fields are kept"
    assert json.loads((out / "modules.json").read_text()) == POOLING
    caplog.clear()
    again = run(out, scheme=None, out="again")
    assert "Left out" not in caplog.text, "the variant's own auto_map is kept"
    assert "modeling_hf_posenc.PosEnc" in (again / "config.json").read_text()
    count_cases("hostile checkpoints", 1)


@pytest.mark.parametrize("role", ["model", "teacher"])
@pytest.mark.parametrize(
    "name", ["config.json", "model.safetensors", "tokenizer.json", "generation_config.json", "1_Pooling/config.json"]
)
def test_links_out_of_the_checkpoint_are_refused(name: str, role: str, source: Path, tmp_path: Path) -> None:
    hostile = source if role == "model" else word_level.saved("gpt2", tmp_path / "teacher")
    private = tmp_path / "private"
    (hostile / name).parent.mkdir(exist_ok=True)
    if not (hostile / name).exists():
        (hostile / name).write_text("{}")
    (hostile / name).rename(private)
    (hostile / name).symlink_to(private)
    with pytest.raises(PosEncError, match=f"{name} is a link to"):
        run(source, teacher=None if role == "model" else hostile)
    assert not (tmp_path / "out").exists()
    count_cases("hostile checkpoints", 1)


def test_links_within_a_cached_repository_are_followed(source: Path, tmp_path: Path) -> None:
    repo = tmp_path / "models--somebody--gpt2"
    (repo / "snapshots").mkdir(parents=True)
    (repo / "blobs").mkdir()
    source = source.rename(repo / "snapshots" / "0123")
    (source.parent / "text.txt").write_text(word_level.text(200))
    for path in list(source.iterdir()):
        path.rename(repo / "blobs" / path.name)
        path.symlink_to(f"../../blobs/{path.name}")
    assert not (run(source) / "tokenizer.json").is_symlink()


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("modules.json", [{"type": "trap.Trap"}], "not a class of sentence-transformers"),
        ("sentence_bert_config.json", {"model_args": {"attn_implementation": "evil/kernel"}}, "code to download"),
    ],
)
def test_companions_are_checked_before_the_training(
    name: str, content: object, message: str, source: Path, tmp_path: Path
) -> None:
    (source / name).write_text(json.dumps(content))
    with pytest.raises(PosEncError, match=message):
        run(source)
    assert not list((tmp_path / "out").glob("*"))
    count_cases("hostile checkpoints", 1)
