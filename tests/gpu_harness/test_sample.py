"""A sample of the tests in `interpreted/`, in a process of its own. `make test-gpu-kernels` runs all of them."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from .conftest import GPU_VARIABLE

ROOT = Path(__file__).parents[2]
SCORE_TERMS = "tests/gpu_harness/interpreted/test_score_terms.py::test_kernels_match_eager_attention"
CONTROLS = "tests/gpu_harness/interpreted/test_controls.py::test_a_kernel_made_wrong_is_caught"
TRITON = "tests/gpu_harness/interpreted/test_triton_bias.py::test_kernels_match_written_out_attention"
SAMPLE = [
    f"{SCORE_TERMS}[t5-llama-padded-bfloat16]",
    f"{CONTROLS}[gradient-of-another-head-bfloat16]",
    f"{TRITON}[documents]",
]
HAS_TRITON = importlib.util.find_spec("triton") is not None


@pytest.mark.skipif(not HAS_TRITON, reason="triton is not installed: it is in the extra triton")
def test_generated_kernels() -> None:
    environment = {**os.environ, GPU_VARIABLE: "h100", "TRITON_INTERPRET": "1", "PYTEST_ADDOPTS": ""}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *SAMPLE]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(SAMPLE)} passed" in done.stdout
