"""Every scheme under tensor parallelism, in two processes: right, or refused."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.distributed import DistributedConfig

from hf_posenc.patches import ARCHITECTURES
from tests.support import families
from tests.support import tiny_models as tiny
from tests.support.cases import CASES, Case
from tests.support.tensor_parallel import run_divided

Results = dict[str, dict[str, float | str]]
SCHEMES = {case.id: case.scheme for case in CASES}
REFUSED_BY_FLEX = {case.id for case in CASES if case.values or case.remaps}
ALL_CHECKS = ["sdpa", "eager", "flex", "padded", "packed", "cached", "generated"]
ALL_CHECKS += ["gradients", "gradients-eager", "gradients-packed", "saved", "reports"]


def run_cases(directory: Path, cases: list[str], checks: list[str], **options: Any) -> Results:
    models = {case: tiny.model("llama", SCHEMES[case], vocab_size=64) for case in cases}
    return run_divided(directory, models, checks, **options)


def assert_equal_to_one_process(results: Results) -> None:
    """To the rounding of float64, and of LLaMA's float32 norms."""
    for case, differences in results.items():
        for check, difference in differences.items():
            if check == "flex" and case in REFUSED_BY_FLEX:
                assert "attn_implementation='flex_attention' cannot" in str(difference), (case, difference)
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
def test_gradient_checkpointing(tmp_path: Path) -> None:
    cases = ["t5", "kerple", "deberta", "rope+shaw"]
    assert_equal_to_one_process(run_cases(tmp_path, cases, ["gradients-checkpointed"]))


FAMILIES = [
    name
    for name in families.MODEL_TYPES
    if any("attn" in key or "attention" in key for key in ARCHITECTURES[name].config_class.base_model_tp_plan or ())
]


@pytest.mark.slow
@pytest.mark.parametrize("model_types", [FAMILIES[start::3] for start in range(3)], ids=["first", "second", "third"])
def test_model_types_with_a_plan(model_types: list[str], tmp_path: Path) -> None:
    """Those that divide heads, and those that gather them before attention."""
    scheme = ["kerple", {"type": "deberta", "max_distance": 4}]
    models = {}
    for name in model_types:
        dtype = torch.float32 if "experts" in families.traits(name) else torch.float64  # as kernels of experts need
        models[name] = families.model(name, scheme, dtype, vocab_size=64)
    results = run_divided(tmp_path, models, ["outputs-and-scheme-gradients"])
    for name, model in models.items():
        difference = results[name]["outputs-and-scheme-gradients"]
        assert isinstance(difference, float), (name, difference)
        assert difference < (1e-3 if model.dtype == torch.float32 else 1e-5), (name, difference)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [{"fsdp_size": 2}, {"fsdp_size": 2, "tp_size": 2}], ids=["fsdp", "fsdp-and-heads"])
def test_parameters_divided_by_fsdp(sizes: dict[str, int], tmp_path: Path) -> None:
    if "fsdp_size" not in inspect.signature(DistributedConfig).parameters:
        pytest.skip("this release of transformers has no FSDP of its own")
    cases = ["kerple", "fire", "deberta", "tupe", "rope+shaw"]
    assert_equal_to_one_process(run_cases(tmp_path, cases, ["gradients"], sizes=sizes))


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
    assert float(run_cases(tmp_path, [case], [check], control=control)[case][check]) > 1e-2
