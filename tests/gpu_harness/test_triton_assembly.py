"""The package's own Triton kernels as machine code of an A100 and H100. Nothing runs."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

from . import assembler, fake_device

HAS_TRITON = importlib.util.find_spec("triton") is not None
SPILL_LIMIT = 128
"""Bytes per thread; flex_attention's kernels for the same bias spill 1,696."""
SMALLEST_MEMORY = 101376
"""Bytes of shared memory per block of consumer GPUs (sm_86, sm_89), which run the kernels of sm_80."""
LLAMA, BERT = (32, 8), (12, 12)
ROWS: list[tuple[str, tuple[int, int], int, torch.dtype, dict[str, Any]]] = [
    ("llama", LLAMA, 128, torch.bfloat16, {}),
    ("llama, packed", LLAMA, 128, torch.bfloat16, {"visible": "spans"}),
    ("llama, dropout", LLAMA, 128, torch.bfloat16, {"dropout": 0.1}),
    ("llama, float32", LLAMA, 128, torch.float32, {}),
    ("bert", BERT, 64, torch.float16, {"visible": "all"}),
    ("odd heads", LLAMA, 80, torch.bfloat16, {}),
]


@pytest.mark.slow
@pytest.mark.skipif(not HAS_TRITON, reason="triton is not installed: it is in the extra triton")
@pytest.mark.parametrize("gpu", fake_device.GPUS.values(), ids=fake_device.GPUS)
@pytest.mark.parametrize(("heads", "size", "dtype", "options"), [row[1:] for row in ROWS], ids=[row[0] for row in ROWS])
def test_kernels_fit(
    heads: tuple[int, int],
    size: int,
    dtype: torch.dtype,
    options: dict[str, Any],
    gpu: fake_device.FakeGPU,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    from .launches import training_launches

    reason = assembler.missing_tool()
    if reason is not None:
        pytest.skip(reason)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    kernels = training_launches(monkeypatch, heads, size, dtype, **options)
    assert len(kernels) == 4
    needs = {name: assembler.assemble(kernel, gpu) for name, kernel in kernels.items()}
    print(needs)
    available = SMALLEST_MEMORY if gpu.architecture == 80 else gpu.shared_memory_per_block_optin
    assert all(need.shared_memory <= available for need in needs.values()), needs
    assert all(need.spilled <= SPILL_LIMIT for need in needs.values()), needs
    atomics = {name: need.atomics for name, need in needs.items()}
    assert 0 < atomics.pop("backward_bias_kernel") <= 4, "flex_attention's backward kernel has 64, all in its loop"
    assert set(atomics.values()) == {0}
