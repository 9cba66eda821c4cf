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

ROOT = Path(__file__).parents[2]
SCHEME = ["t5", {"type": "kerple"}]


def train(processes: int, architecture: str, output_dir: Path) -> dict[str, torch.Tensor]:
    """Run tests/fixtures/ddp_train.py and return the weights that it saves."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    script = ["-m", "tests.fixtures.ddp_train", architecture, str(output_dir)]
    done = subprocess.run(
        [sys.executable, *(launcher if processes > 1 else []), *script],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return load_file(output_dir / "model" / "model.safetensors")


@pytest.mark.parametrize("architecture", ["gpt2", pytest.param("llama", marks=pytest.mark.slow)])
def test_two_processes_equal_one(architecture: str, tmp_path: Path) -> None:
    """Up to float32 rounding: averaging gradients over processes changes the order of sums."""
    distributed, single = (train(count, architecture, tmp_path / str(count)) for count in (2, 1))
    assert distributed.keys() == single.keys()
    for name, expected in single.items():
        torch.testing.assert_close(distributed[name], expected, rtol=1e-4, atol=1e-5, msg=name)
    assert AutoConfig.from_pretrained(tmp_path / "2" / "model").position_scheme == SCHEME

    shutil.copytree(tmp_path / "2" / "checkpoint", tmp_path / "resumed" / "checkpoint")
    resumed = train(2, architecture, tmp_path / "resumed")
    assert all(torch.equal(resumed[name], weight) for name, weight in distributed.items())
