"""Every scheme under tensor parallelism, in two processes: right, or refused."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.cases import CASES
from tests.support import tiny_models as tiny

ROOT = Path(__file__).parents[2]
Results = dict[str, dict[str, float | str]]


def run_in_two_processes(directory: Path, schemes: dict[str, Any], checks: list[str], **settings: str) -> Results:
    """Run checks of tests/fixtures/tensor_parallel.py on LLaMA variants with these schemes."""
    for name, scheme in schemes.items():
        tiny.model("llama", scheme, vocab_size=64).save_pretrained(directory / name)
    (directory / "checks.json").write_text(json.dumps(checks))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.fixtures.tensor_parallel", str(directory)]
    processes = [
        subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, **common, **settings, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    errors = [process.communicate(timeout=600)[1] for process in processes]
    assert all(process.returncode == 0 for process in processes), "\n".join(error[-2000:] for error in errors)
    return json.loads((directory / "results.json").read_text())


SCORE_CASES = {case.id: case.scheme for case in CASES if case.scores}
OTHER_CASES = {case.id: case.scheme for case in CASES if not case.scores}
ALL_CHECKS = ["sdpa", "eager", "flex", "padded", "packed", "cached", "gradients", "gradients-eager", "gradients-packed"]


@pytest.mark.slow
def test_other_schemes_equal_one_process(tmp_path: Path) -> None:
    results = run_in_two_processes(tmp_path, OTHER_CASES, ALL_CHECKS)
    for case, differences in results.items():
        for check, difference in differences.items():
            assert isinstance(difference, float) and difference < 1e-5, (case, check, difference)


@pytest.mark.slow
def test_score_terms_are_refused(tmp_path: Path) -> None:
    results = run_in_two_processes(tmp_path, SCORE_CASES, ALL_CHECKS)
    for case, differences in results.items():
        for check, difference in differences.items():
            assert "PosEncError" in str(difference), (case, check, difference)
