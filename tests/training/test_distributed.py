"""`hf-posenc train` with DDP and FSDP2 on two processes gives the result of one process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from safetensors.torch import load_file

from tests.support import word_level_tokenizer as word_level
from tests.support.sharded_runs import NO_VALUE, losses, resume, save_sources, train, two_schemes


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = save_sources(tmp_path_factory.mktemp("source"))
    documents = [{"text": word_level.text(3 + 4 * number % 13, number)} for number in range(80)]
    (directory / "documents.jsonl").write_text("\n".join(map(json.dumps, documents)))
    return directory


def padded(source: Path) -> dict[str, Any]:
    """The default recipe on documents of different lengths, one per row."""
    return {"model": source / "llama", "data": source / "documents.jsonl", "scheme": "t5", "no_packing": NO_VALUE}


@pytest.fixture(scope="module")
def single_process(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train("one", tmp_path_factory.mktemp("one") / "out", **two_schemes(source))


@pytest.mark.slow  # tests/integration/test_data_parallel.py runs DDP in the fast tests
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_two_processes_match_one(
    kind: Literal["ddp", "fsdp"], source: Path, single_process: Path, tmp_path: Path
) -> None:
    """Up to float32 rounding: sums are taken in another order, and Adam's first steps amplify the difference."""
    out = train(kind, tmp_path / "out", **two_schemes(source))
    for name in ("loss", "kl_loss", "hidden_loss"):
        torch.testing.assert_close(losses(out, name), losses(single_process, name), rtol=1e-4, atol=2e-6, msg=name)
    weights, expected = load_file(out / "model.safetensors"), load_file(single_process / "model.safetensors")
    assert set(weights) == set(expected)
    torch.testing.assert_close(weights, expected, rtol=0, atol=5e-5)
    assert not [path for path in out.rglob("*") if path.suffix in (".bin", ".pt", ".pth", ".distcp")]
    if kind == "fsdp":
        resume(kind, out, **two_schemes(source))
        resumed = load_file(out / "model.safetensors")
        assert all(torch.equal(resumed[name], weights[name]) for name in weights), "resumed, bit-identical"


@pytest.mark.slow
def test_padded_rows_are_weighted_by_tokens(source: Path, tmp_path: Path) -> None:
    train("one", tmp_path / "one", **padded(source))
    train("ddp", tmp_path / "two", **padded(source))
    for name in ("loss", "kl_loss", "hidden_loss"):
        torch.testing.assert_close(
            losses(tmp_path / "two", name), losses(tmp_path / "one", name), rtol=1e-4, atol=2e-6, msg=name
        )
    weights, expected = (load_file(tmp_path / name / "model.safetensors") for name in ("two", "one"))
    torch.testing.assert_close(weights, expected, rtol=0, atol=5e-5)
