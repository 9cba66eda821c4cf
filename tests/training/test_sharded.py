"""The recommended recipe with FSDP2 and DeepSpeed ZeRO-3 on two processes gives the losses of one process.

The fixture `sharded_train` makes sure that the student and the teacher are sharded.
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import hf_posenc
from tests.support.cases import CASES as SCHEMES
from tests.support.sharded_runs import NO_VALUE, STEPS, Kind, losses, resume, save_sources, train, two_schemes
from tests.support.zero3_steps import loss_differences

ROOT = Path(__file__).parents[2]
CHECKPOINTING = {"gradient_checkpointing": NO_VALUE, "gradient_checkpointing_kwargs": '{"use_reentrant": false}'}
CASES: dict[str, dict[str, Any]] = {
    "all": {},
    "lora": {"trainable": "lora"},
    "positions": {"trainable": "positions"},
    "checkpointing": CHECKPOINTING,
    "bf16": {"bf16": NO_VALUE},
}
needs_deepspeed = pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs hf_posenc[deepspeed]")
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_sources(tmp_path_factory.mktemp("source"))


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def single_process(case: str, source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train("one", tmp_path_factory.mktemp("one") / "out", **two_schemes(source), **CASES[case])


@pytest.mark.parametrize("kind", ["fsdp", pytest.param("zero3", marks=needs_deepspeed)])
def test_equals_one_process(kind: Kind, case: str, source: Path, single_process: Path, tmp_path: Path) -> None:
    """To rounding, of bfloat16 with --bf16: there FSDP2 and ZeRO-3 also round the weights of each step."""
    rtol = torch.finfo(torch.bfloat16 if case == "bf16" else torch.float32).eps * 4
    options = two_schemes(source) | CASES[case]
    out = train(kind, tmp_path / "out", **options)
    for name in ("loss", "kl_loss", "hidden_loss"):
        expected = losses(single_process, name)
        assert len(expected) == STEPS
        torch.testing.assert_close(losses(out, name), expected, rtol=rtol, atol=2e-6, msg=name)
    weights, expected_weights = (load_file(path / "model.safetensors") for path in (out, single_process))
    assert set(weights) == set(expected_weights)
    if case != "bf16":
        torch.testing.assert_close(weights, expected_weights, rtol=0, atol=2e-6)


@needs_deepspeed
@pytest.mark.parametrize("trainable", ["all", "lora"])
def test_zero3_resumes(trainable: str, source: Path, tmp_path: Path) -> None:
    options = two_schemes(source) | {"trainable": trainable}
    out = train("zero3", tmp_path / "out", **options)
    weights = load_file(out / "model.safetensors")
    resume("zero3", out, **options)
    resumed = load_file(out / "model.safetensors")
    assert all(torch.equal(resumed[name], weights[name]) for name in weights)


@needs_deepspeed
@pytest.mark.parametrize("number", range(4))
def test_every_scheme_with_zero3(number: int, tmp_path: Path) -> None:
    """To float32 rounding. DeepSpeed fails on modules that return a dtype, so training with `cope` is refused."""
    differences = loss_differences({case.id: case.scheme for case in SCHEMES[number::4]}, tmp_path)
    refused = {name: differences.pop(name) for name in list(differences) if name.startswith("cope")}
    assert all("vars() argument" in str(error) for error in refused.values()), refused
    assert all(isinstance(value, float) and value < 1e-5 for value in differences.values()), differences


@needs_deepspeed
def test_example_of_zero3_runs(source: Path, tmp_path: Path) -> None:
    """With the recommended recipe in bfloat16, on two processes."""
    out = tmp_path / "out"
    launcher = ["accelerate.commands.launch", "--config_file", ROOT / "examples" / "configs" / "deepspeed_zero3.yaml"]
    options = {"model": source / "llama", "data": source / "text.txt", "eval-data": source / "text.txt"}
    options |= {"scheme": "t5", "train-length": 16, "max-steps": STEPS, "save-steps": 2, "logging-steps": 1}
    options |= {"learning-rate": 1e-3, "per-device-train-batch-size": 2, "ddp-backend": "gloo", "output-dir": out}
    line = ["-m", *launcher, ROOT / "tests" / "fixtures" / "sharded_train.py", "train", "--bf16"]
    line += [text for name, value in options.items() for text in (f"--{name}", value)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), environment.get("PYTHONPATH", "")])
    command = [sys.executable, *map(str, line)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert result.returncode == 0, result.stderr[-3000:]
    assert losses(out)[-1] < losses(out)[0]
    model = AutoModelForCausalLM.from_pretrained(out)
    assert hf_posenc.explain(model)
    assert model(torch.arange(16)[None]).logits.isfinite().all()
