"""Every scheme under tensor parallelism, in two processes: right, or refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import tiny_models as tiny
from tests.support.cases import CASES, Case
from tests.support.tensor_parallel import run_in_two_processes

Results = dict[str, dict[str, float | str]]
SCHEMES = {case.id: case.scheme for case in CASES}
ALL_CHECKS = ["sdpa", "eager", "flex", "padded", "packed", "cached", "generated"]
ALL_CHECKS += ["gradients", "gradients-eager", "gradients-packed", "saved", "reports"]


def run_cases(directory: Path, cases: list[str], checks: list[str], control: str | None = None) -> Results:
    models = {case: tiny.model("llama", SCHEMES[case], vocab_size=64) for case in cases}
    return run_in_two_processes(directory, models, checks, control)


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
    results = run_cases(tmp_path, [case.id for case in cases], ALL_CHECKS)
    assert len(results) == len(cases)
    assert_equal_to_one_process(results)


def test_heads_and_gradients_in_two_processes(tmp_path: Path) -> None:
    """One scheme with a term per head and one with a shared table; the slow tests have the rest."""
    assert_equal_to_one_process(run_cases(tmp_path, ["kerple", "shaw"], ["sdpa", "gradients"]))


@pytest.mark.slow
def test_processes_share_random_scheme_parameters(tmp_path: Path) -> None:
    results = run_cases(tmp_path, ["none"], ["random-start"])
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
    assert float(run_cases(tmp_path, [case], [check], control)[case][check]) > 1e-2
