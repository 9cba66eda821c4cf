"""Training a variant under DDP equals training it in one process, and resumes from a checkpoint."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig

import hf_posenc  # noqa: F401
from tests.fixtures import ddp_train

ROOT = Path(__file__).parents[2]


def train_in_two_processes(architecture: str, output_dir: Path) -> dict[str, torch.Tensor]:
    """Run tests/fixtures/ddp_train.py and return the weights that it saves."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [sys.executable, *launcher, "-m", "tests.fixtures.ddp_train", architecture, str(output_dir)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return load_file(output_dir / "model" / "model.safetensors")


def train_in_this_process(architecture: str) -> dict[str, torch.Tensor]:
    model, optimizer = ddp_train.build(architecture)
    for step in range(ddp_train.STEPS):
        rows = ddp_train.batch(step)
        model(rows, labels=rows).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["gpt2", "llama"])
def test_two_processes_equal_one(architecture: str, tmp_path: Path) -> None:
    """Up to float32 rounding: averaging gradients over processes changes the order of sums."""
    distributed, expected = train_in_two_processes(architecture, tmp_path), train_in_this_process(architecture)
    for name, weight in distributed.items():
        torch.testing.assert_close(weight, expected[name], rtol=1e-4, atol=1e-5, msg=name)
    assert any("position_scheme" in name for name in distributed)
    assert AutoConfig.from_pretrained(tmp_path / "model").position_scheme == ddp_train.SCHEME


@pytest.mark.slow
def test_training_resumes_from_a_checkpoint(tmp_path: Path) -> None:
    complete = train_in_two_processes("gpt2", tmp_path / "complete")
    shutil.copytree(tmp_path / "complete" / "checkpoint", tmp_path / "resumed" / "checkpoint")
    resumed = train_in_two_processes("gpt2", tmp_path / "resumed")
    assert all(torch.equal(resumed[name], weight) for name, weight in complete.items())
