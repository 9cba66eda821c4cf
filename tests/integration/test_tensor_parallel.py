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

from tests.support import tiny_models as tiny
from tests.support.cases import CASES, Case

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


ALL_CHECKS = ["sdpa", "eager", "flex", "padded", "packed", "cached", "generated"]
ALL_CHECKS += ["gradients", "gradients-eager", "gradients-packed", "saved", "reports"]


def assert_equal_to_one_process(results: Results) -> None:
    """To the rounding of float64, and of LLaMA's float32 norms. flex_attention refuses schemes that add to values."""
    for case, differences in results.items():
        for check, difference in differences.items():
            if check == "flex" and "cannot add the value term" in str(difference):
                continue
            assert isinstance(difference, float), (case, check, difference)
            assert difference < 1e-5, (case, check, difference)


@pytest.mark.slow
@pytest.mark.parametrize("cases", [CASES[start::4] for start in range(4)], ids=["first", "second", "third", "fourth"])
def test_every_scheme_equals_one_process(cases: list[Case], tmp_path: Path) -> None:
    results = run_in_two_processes(tmp_path, {case.id: case.scheme for case in cases}, ALL_CHECKS)
    assert len(results) == len(cases)
    assert_equal_to_one_process(results)


def test_heads_and_gradients_in_two_processes(tmp_path: Path) -> None:
    """One scheme with a term per head and one with a shared table; the slow tests have the rest."""
    schemes = {case.id: case.scheme for case in CASES if case.id in ("kerple", "shaw")}
    assert_equal_to_one_process(run_in_two_processes(tmp_path, schemes, ["sdpa", "gradients"]))


@pytest.mark.slow
def test_processes_share_random_scheme_parameters(tmp_path: Path) -> None:
    results = run_in_two_processes(tmp_path, {"none": "none"}, ["random-start"])
    assert results["none"]["random-start"] == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("control", "case", "check"),
    [
        ("heads of the first process", "alibi", "sdpa"),
        ("gradients not summed", "shaw", "gradients"),
        ("gradients summed twice", "deberta", "gradients"),
        ("scheme parameters not shared", "none", "random-start"),
    ],
)
def test_mistakes_are_found(control: str, case: str, check: str, tmp_path: Path) -> None:
    """The controls for the tests above."""
    schemes = {case.id: case.scheme for case in CASES}
    results = run_in_two_processes(tmp_path, {case: schemes[case]}, [check], CONTROL=control)
    assert float(results[case][check]) > 1e-2
