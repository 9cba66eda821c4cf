"""Measuring on a noisy machine: several things in turn, round after round, and the ratio of each to one of them.

A ratio is taken within each round, where both sides saw the same machine. Its median and quartiles over the rounds are
what is reported; times alone say little.
"""

from __future__ import annotations

import dataclasses
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

Run = Callable[[], object]


@dataclasses.dataclass(frozen=True)
class Measured:
    """One thing that was measured against the baseline of its group."""

    name: str
    milliseconds: float
    ratio: float
    low: float
    high: float
    rounds: int


def interleaved(runs: dict[str, Run], baseline: str, rounds: int) -> list[Measured]:
    """Each of `runs` once to warm up, then all of them in turn for so many rounds."""
    for run in runs.values():
        run()
    times: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(rounds):
        names = list(runs) if number % 2 else list(reversed(runs))  # so that nobody always follows the same one
        for name in names:
            start = time.perf_counter()
            runs[name]()
            times[name].append(time.perf_counter() - start)
    return [_summary(name, times[name], times[baseline]) for name in runs]


def _summary(name: str, own: list[float], baseline: list[float]) -> Measured:
    ratios = [mine / theirs for mine, theirs in zip(own, baseline, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
    return Measured(name, 1000 * statistics.median(own), middle, low, high, len(ratios))


def peak_memory(code: str) -> float:
    """Megabytes that a fresh process needs at its peak beyond what it had before `run()`, which `code` must define."""
    script = f"""
import resource, sys
{code}
def status(field):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(field + ":"))
before = status("VmRSS")
try:
    open("/proc/self/clear_refs", "w").write("5")  # the high-water mark starts anew
except OSError:
    before = status("VmHWM")
run()
print("peak", (status("VmHWM") - before) / 1024)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr)
    return float(done.stdout.rsplit("peak ", 1)[1])
