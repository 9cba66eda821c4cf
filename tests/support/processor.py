"""A guard against processors on which torch's AMX kernels crash."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

SETTING, WITHOUT_AMX = "ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16"
PROBE = "import torch; torch.ones(64, 64, dtype=torch.bfloat16) @ torch.ones(64, 64, dtype=torch.bfloat16)"


def avoid_broken_amx() -> None:
    """Turn AMX off, also in subprocesses, if it crashes.

    Some virtual machines advertise AMX but kill a process that multiplies bfloat16 matrices, in stock models too.
    """
    cpu_info = Path("/proc/cpuinfo")
    if SETTING in os.environ or not cpu_info.is_file() or "amx_bf16" not in cpu_info.read_text(encoding="utf-8"):
        return
    probe = subprocess.run([sys.executable, "-c", PROBE], stderr=subprocess.DEVNULL, check=False)
    if probe.returncode == -signal.SIGILL:
        os.environ[SETTING] = WITHOUT_AMX
