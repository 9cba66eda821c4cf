"""Collects the tests in `interpreted/` only in a process that was started for them: they change torch for good."""

from __future__ import annotations

import os

import pytest

GPU_VARIABLE = "HF_POSENC_FAKE_GPU"
"""The environment variable that names the GPU, h100 or a100."""

if GPU_VARIABLE in os.environ:
    from tests.gpu_harness import backend, fake_device, launcher

    if not launcher.runs_kernels():
        raise pytest.UsageError(f"{GPU_VARIABLE} needs TRITON_INTERPRET=1 from the start of the process")
    backend.install(fake_device.GPUS[os.environ[GPU_VARIABLE]])
else:
    collect_ignore = ["interpreted"]
