"""The cost of `import hf_posenc` after `import torch, transformers`: fresh processes, interleaved, medians."""

from __future__ import annotations

import statistics
import subprocess
import sys

from .measure import Measurement

BASE = "import torch, transformers"
NAME = "import hf_posenc"
TIMED = "import time; start = time.perf_counter(); {}; print(time.perf_counter() - start)"
CONFIG_IMPORT = "from transformers import GPT2Config"
SCRIPTS = {
    BASE: TIMED.format(BASE),
    NAME: f"{BASE}; {TIMED.format(NAME)}",
    CONFIG_IMPORT: f"{BASE}; {TIMED.format(CONFIG_IMPORT)}",
    f"{CONFIG_IMPORT} after {NAME}": f"{BASE}, hf_posenc; {TIMED.format(CONFIG_IMPORT)}",
}


def time_scripts(rounds: int) -> dict[str, list[float]]:
    """Return the seconds of each script, round by round."""
    times: dict[str, list[float]] = {name: [] for name in SCRIPTS}
    for _ in range(rounds):
        for name, code in SCRIPTS.items():
            times[name].append(float(subprocess.check_output([sys.executable, "-c", code], text=True)))
    return times


def measure(rounds: int = 5) -> Measurement:
    """Measure `import hf_posenc`, with its ratio to `import torch, transformers`."""
    times = time_scripts(rounds)
    ratios = [ours / base for ours, base in zip(times[NAME], times[BASE], strict=True)]
    low, ratio, high = statistics.quantiles(ratios, n=4)
    milliseconds = 1000 * statistics.median(times[NAME])
    return Measurement("import", "fresh process", 0, NAME, milliseconds, "ms", ratio, low, high, rounds)


def main() -> None:
    for name, times in time_scripts(5).items():
        median, fastest, slowest = (1e3 * of(times) for of in (statistics.median, min, max))
        print(f"{name:<58} {median:8.1f} ms ({fastest:.1f} to {slowest:.1f})")


if __name__ == "__main__":
    main()
