"""The GPU benchmark runs, at toy size on the CPU, and its page says that it has not been run on a GPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks import gpu


def test_the_page_is_current() -> None:
    results = json.loads(gpu.RESULTS.read_text()) if gpu.RESULTS.exists() else None
    assert gpu.PAGE.read_text() == gpu.render_page(results)
    assert ("**Not yet run.**" in gpu.PAGE.read_text()) == (results is None)


def test_a_sample_at_toy_size() -> None:
    cases = [
        gpu.Case(None, "sdpa", False),
        gpu.Case("t5", "default", True),
        gpu.Case("alibi", "bias written out", False),
    ]
    results = gpu.run(gpu.TOY, torch.device("cpu"), [*cases, gpu.Case("alibi", "default", False)])
    assert [row["error"] for row in results["rows"]] == [""] * 4
    assert all(row["forward_ms"] > 0 and row["training_ms"] > 0 for row in results["rows"])
    page = gpu.render_page(json.loads(json.dumps(results)))
    assert "## 16 tokens, four documents in a row" in page
    assert page.count("| alibi |") == 2
    refused = gpu.measure(gpu.Case("shaw", "flex_attention", False), gpu.TOY, 16, torch.device("cpu"))
    assert "flex_attention" in refused.error  # control: a case that cannot run is reported


@pytest.mark.slow
def test_all_cases_at_toy_size(tmp_path: Path) -> None:
    gpu.main(["--toy", "--out", str(tmp_path)])
    results = json.loads((tmp_path / "gpu.json").read_text())
    assert len(results["rows"]) == len(list(gpu.all_cases()))
    errors = {(row["case"]["scheme"], row["case"]["path"]): row["error"] for row in results["rows"] if row["error"]}
    # On a CPU, flex_attention has no gradients, and FlashAttention is not there.
    assert {path for _, path in errors} <= {"flex_attention", "flash_attention_2"}
    assert (tmp_path / "GPU_SPEED.md").read_text() == gpu.render_page(results)


def test_toy_numbers_do_not_replace_real_ones(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        gpu.main(["--toy"])
    assert "--out" in capsys.readouterr().err
