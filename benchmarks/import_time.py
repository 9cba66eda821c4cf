"""What `import hf_posenc` costs on top of `import torch, transformers`: fresh processes, interleaved, medians."""

from __future__ import annotations

import statistics
import subprocess
import sys

BASE = "import torch, transformers"
TIMED = "import time; start = time.perf_counter(); {}; print(time.perf_counter() - start)"
CASES = {
    "import torch, transformers": TIMED.format(BASE),
    "then import hf_posenc": f"{BASE}; {TIMED.format('import hf_posenc')}",
    "then from transformers import GPT2Config": f"{BASE}; {TIMED.format('from transformers import GPT2Config')}",
    "the same with hf_posenc imported": f"{BASE}, hf_posenc; {TIMED.format('from transformers import GPT2Config')}",
}


def main(rounds: int = 5) -> None:
    times: dict[str, list[float]] = {name: [] for name in CASES}
    for _ in range(rounds):
        for name, code in CASES.items():
            times[name].append(float(subprocess.check_output([sys.executable, "-c", code], text=True)))
    for name, found in times.items():
        print(f"{name:<42} {1e3 * statistics.median(found):8.1f} ms ({1e3 * min(found):.1f} to {1e3 * max(found):.1f})")


if __name__ == "__main__":
    main()
