"""The same training in two processes and in one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig

import hf_posenc  # noqa: F401

SCRIPT = Path(__file__).parents[1] / "fixtures" / "two_processes.py"


def run(processes: int, architecture: str, out: Path) -> dict[str, torch.Tensor]:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    command = [sys.executable, *(launcher if processes > 1 else []), str(SCRIPT), architecture, str(out)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return load_file(out / "model" / "model.safetensors")


@pytest.mark.parametrize("architecture", ["gpt2", pytest.param("llama", marks=pytest.mark.slow)])
def test_a_handover_under_ddp_is_that_of_one_process(architecture: str, tmp_path: Path) -> None:
    """Means of gradients over processes are sums in another order: equal to float32 rounding, not to the bit."""
    two, one = run(2, architecture, tmp_path / "two"), run(1, architecture, tmp_path / "one")
    assert set(two) == set(one)
    assert not any("wpe" in name or "handover" in name for name in two)
    for name, expected in one.items():
        torch.testing.assert_close(two[name], expected, rtol=1e-4, atol=1e-5, msg=name)
    assert AutoConfig.from_pretrained(tmp_path / "two" / "model").position_scheme == ["t5", {"type": "kerple"}]
    middle = load_file(tmp_path / "two" / "middle" / "model.safetensors")
    assert next(value for name, value in middle.items() if name.endswith("handover.progress")).tolist() == [2, 3]
