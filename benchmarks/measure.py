"""Measure on a noisy machine: run all candidates in turn, round after round, and report ratios to the first one.

Each ratio is taken within a round, where both sides saw the same machine; the report has its median and quartiles.
Absolute times say little. Memory is the peak of a fresh process.
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
class Measurement:
    """The result of one candidate among those with the same group, setting and length.

    Attributes:
        value: The median, in `unit`.
        ratio: The median ratio to the first candidate; `low` and `high` are its quartiles.
    """

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


def time_interleaved(group: str, setting: str, length: int, runs: dict[str, Run], rounds: int) -> list[Measurement]:
    """Warm up each candidate once, then time all of them in turn for `rounds` rounds."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(rounds + 1):
        names = list(runs) if number % 2 else list(reversed(runs))  # no candidate always follows the same one
        for index, name in enumerate(names):
            if sys.stderr.isatty():
                progress = f"round {number}/{rounds}, {index + 1}/{len(names)}"
                print(f"\r{group}, {setting}, n={length}: {progress}   ", end="", file=sys.stderr)
            start = time.perf_counter()
            runs[name]()
            if number:
                times[name].append(time.perf_counter() - start)
    baseline = times[next(iter(runs))]
    return [_summarize(group, setting, length, name, times[name], baseline) for name in runs]


def _summarize(
    group: str, setting: str, length: int, name: str, times: list[float], baseline: list[float]
) -> Measurement:
    ratios = [seconds / reference for seconds, reference in zip(times, baseline, strict=True)]
    low, ratio, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
    milliseconds = 1000 * statistics.median(times)
    return Measurement(group, setting, length, name, milliseconds, "ms", ratio, low, high, len(ratios))


def peak_memory(code: str) -> float:
    """Return the peak memory of `run()`, which `code` must define, in megabytes above that before the call.

    Runs in a fresh process.
    """
    script = f"""
{code}
def status(field):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(field + ":"))
before = status("VmRSS")
try:
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # reset the high-water mark
except OSError:
    before = status("VmHWM")
run()
print("peak", (status("VmHWM") - before) / 1024)
"""
    # malloc returns freed memory at once; otherwise `run` could reuse memory freed before it.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "0"}
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        raise RuntimeError(done.stderr)
    return float(done.stdout.rsplit("peak ", 1)[1])
