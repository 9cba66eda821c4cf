"""`hf-posenc train` with DDP and FSDP2 on two processes gives the result of one process."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from hf_posenc.checkpoints import RUN_STATE_FILE
from tests.support import word_level_tokenizer as word_level

SHARDED = Path(__file__).parents[1] / "fixtures" / "sharded_train.py"
FSDP = {"version": 2, "auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "state_dict_type": "FULL_STATE_DICT"}
STEPS, NO_VALUE = 6, ""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("source")
    for architecture in ("gpt2", "llama"):
        word_level.saved(architecture, directory / architecture)
    (directory / "text.txt").write_text(word_level.text(2000))
    documents = [{"text": word_level.text(3 + 4 * number % 13, number)} for number in range(80)]
    (directory / "documents.jsonl").write_text("\n".join(map(json.dumps, documents)))
    return directory


def run(source: Path, out: Path, kind: str, options: dict[str, object]) -> None:
    options = {**options, "train-length": 16, "output-dir": out}
    options |= {"max-steps": STEPS, "save-steps": 2, "logging-steps": 1, "learning-rate": 1e-3, "use-cpu": True}
    options |= {"disable-tqdm": True, "per-device-train-batch-size": 4 if kind == "one" else 2}
    if kind == "fsdp":
        options |= {"fsdp": "full_shard", "fsdp-config": json.dumps(FSDP)}
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"] if kind != "one" else []
    program = [str(SHARDED)] if kind == "fsdp" else ["-m", "hf_posenc"]
    line = [text for name, value in options.items() for text in (f"--{name}", str(value))]
    line = [text for text in line if text != NO_VALUE]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        [sys.executable, *launcher, *program, "train", *line],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-3000:]


def losses(out: Path, name: str = "loss") -> list[float]:
    history = json.loads((out / f"checkpoint-{STEPS}" / "trainer_state.json").read_text())["log_history"]
    return [entry[name] for entry in history if "loss" in entry]


def two_schemes(source: Path) -> dict[str, object]:
    """Schemes with parameters shared by all layers and per layer."""
    options = {"model": source / "gpt2", "data": source / "text.txt"}
    return options | {
        "scheme": '["t5", {"type": "deberta", "max_distance": 8}]',
        "fit-ratio": 0.05,
    }


def padded(source: Path) -> dict[str, object]:
    """The default recipe on documents of different lengths, one per row."""
    return {"model": source / "llama", "data": source / "documents.jsonl", "scheme": "t5", "no-packing": NO_VALUE}


@pytest.fixture(scope="module")
def single_process(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("one") / "out"
    run(source, out, "one", two_schemes(source))
    return out


@pytest.mark.slow  # tests/integration/test_data_parallel.py runs DDP in the fast tests
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_two_processes_match_one(kind: str, source: Path, single_process: Path, tmp_path: Path) -> None:
    """Up to float32 rounding: sums are taken in another order, and Adam's first steps amplify the difference."""
    out = tmp_path / "out"
    run(source, out, kind, two_schemes(source))
    for name in ("loss", "kl_loss", "hidden_loss"):
        torch.testing.assert_close(losses(out, name), losses(single_process, name), rtol=1e-4, atol=2e-6, msg=name)
    weights, expected = load_file(out / "model.safetensors"), load_file(single_process / "model.safetensors")
    assert set(weights) == set(expected)
    torch.testing.assert_close(weights, expected, rtol=0, atol=5e-5)
    assert not [path for path in out.rglob("*") if path.suffix in (".bin", ".pt", ".pth", ".distcp")]
    if kind == "fsdp":
        shutil.rmtree(out / "checkpoint-6")
        shutil.rmtree(out / "checkpoint-4")
        state = json.loads((out / RUN_STATE_FILE).read_text())
        (out / RUN_STATE_FILE).write_text(json.dumps({**state, "finished": False}))
        run(source, out, kind, two_schemes(source))
        resumed = load_file(out / "model.safetensors")
        assert all(torch.equal(resumed[name], weights[name]) for name in weights), "resumed from step 2, bit-identical"


@pytest.mark.slow
def test_padded_rows_are_weighted_by_tokens(source: Path, tmp_path: Path) -> None:
    run(source, tmp_path / "one", "one", padded(source))
    run(source, tmp_path / "two", "ddp", padded(source))
    for name in ("loss", "kl_loss", "hidden_loss"):
        torch.testing.assert_close(
            losses(tmp_path / "two", name), losses(tmp_path / "one", name), rtol=1e-4, atol=2e-6, msg=name
        )
    weights, expected = (load_file(tmp_path / name / "model.safetensors") for name in ("two", "one"))
    torch.testing.assert_close(weights, expected, rtol=0, atol=5e-5)
