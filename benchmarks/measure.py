"""Measuring on a noisy machine: several things in turn, round after round, and the ratio of each to one of them.

A ratio is taken within each round, where both sides saw the same machine. Its median and quartiles over the rounds are
what is reported; times alone say little. Memory is that of a fresh process at its peak.
"""

from __future__ import annotations

import dataclasses
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

Run = Callable[[], object]


@dataclasses.dataclass(frozen=True)
class Measured:
    """One thing that was measured, beside the others of its group and setting."""

    group: str
    setting: str
    length: int
    name: str
    value: float
    unit: str
    ratio: float
    low: float
    high: float
    rounds: int


def interleaved(group: str, setting: str, length: int, runs: dict[str, Run], rounds: int) -> list[Measured]:
    """Each of `runs` once to warm up, then all of them in turn for so many rounds; ratios are to the first one."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(rounds + 1):
        names = list(runs) if number % 2 else list(reversed(runs))  # so that nobody always follows the same one
        for place, name in enumerate(names):
            if sys.stderr.isatty():
                print(
                    f"\r{group}, {setting}, n={length}: round {number}/{rounds}, {place + 1}/{len(names)}   ",
                    end="",
                    file=sys.stderr,
                )
            start = time.perf_counter()
            runs[name]()
            if number:
                times[name].append(time.perf_counter() - start)
    baseline = times[next(iter(runs))]
    return [_summary(group, setting, length, name, times[name], baseline) for name in runs]


def _summary(group: str, setting: str, length: int, name: str, own: list[float], baseline: list[float]) -> Measured:
    ratios = [mine / theirs for mine, theirs in zip(own, baseline, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
    return Measured(group, setting, length, name, 1000 * statistics.median(own), "ms", middle, low, high, len(ratios))


def peak_memory(code: str) -> float:
    """Megabytes that a fresh process needs at its peak beyond what it had before `run()`, which `code` must define."""
    script = f"""
{code}
def status(field):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(field + ":"))
before = status("VmRSS")
try:
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # the high-water mark starts anew
except OSError:
    before = status("VmHWM")
run()
print("peak", (status("VmHWM") - before) / 1024)
"""
    # Freed memory goes back at once, so that what was freed before does not hide what is taken now.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "0"}
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        raise RuntimeError(done.stderr)
    return float(done.stdout.rsplit("peak ", 1)[1])
