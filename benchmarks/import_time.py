"""What `import hf_posenc` costs on top of `import torch, transformers`: fresh processes, interleaved, medians."""

from __future__ import annotations

import statistics
import subprocess
import sys

from .measure import Measured

BASE = "import torch, transformers"
TIMED = "import time; start = time.perf_counter(); {}; print(time.perf_counter() - start)"
CASES = {
    "import torch, transformers": TIMED.format(BASE),
    "then import hf_posenc": f"{BASE}; {TIMED.format('import hf_posenc')}",
    "then from transformers import GPT2Config": f"{BASE}; {TIMED.format('from transformers import GPT2Config')}",
    "the same with hf_posenc imported": f"{BASE}, hf_posenc; {TIMED.format('from transformers import GPT2Config')}",
}


def timed(rounds: int) -> dict[str, list[float]]:
    """Seconds of each case, round by round."""
    times: dict[str, list[float]] = {name: [] for name in CASES}
    for _ in range(rounds):
        for name, code in CASES.items():
            times[name].append(float(subprocess.check_output([sys.executable, "-c", code], text=True)))
    return times


def measured(rounds: int = 5) -> Measured:
    """The one that matters, as the other benchmarks give theirs."""
    found = timed(rounds)
    name, base = "then import hf_posenc", found["import torch, transformers"]
    ratios = [own / theirs for own, theirs in zip(found[name], base, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    milliseconds = 1000 * statistics.median(found[name])
    return Measured("import", "fresh process", 0, name, milliseconds, "ms", middle, low, high, rounds)


def main() -> None:
    for name, found in timed(5).items():
        print(f"{name:<42} {1e3 * statistics.median(found):8.1f} ms ({1e3 * min(found):.1f} to {1e3 * max(found):.1f})")


if __name__ == "__main__":
    main()
