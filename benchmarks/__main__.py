"""Attention alone under the schemes against plain SDPA: `python -m benchmarks`, or `make bench-quick`."""

from __future__ import annotations

import argparse
import platform

import torch
from transformers.utils import logging

from . import attention
from .measure import interleaved

BY_DISTANCE = ["alibi", "t5", "kerple", "sandwich"]
BY_CONTENT = ["tupe", "transformer_xl", "shaw (keys)", "shaw", "deberta"]
CASES = [
    ("causal, no gradient", BY_DISTANCE, {"causal": True, "batch": 1, "padded": False, "grad": False}),
    ("causal, left-padded batch of 4", BY_DISTANCE, {"causal": True, "batch": 4, "padded": True, "grad": False}),
    ("causal, forward and backward", ["alibi", "t5"], {"causal": True, "batch": 1, "padded": False, "grad": True}),
    ("both ways, no gradient", BY_CONTENT, {"causal": False, "batch": 1, "padded": False, "grad": False}),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024])
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    logging.set_verbosity_error()
    threads = torch.get_num_threads()
    print(f"{platform.processor() or platform.machine()}, {threads} threads, torch {torch.__version__}, float32")
    print(
        f"{attention.HEADS} heads of {attention.HEAD_SIZE}; ratio to plain SDPA, median and quartiles of the rounds\n"
    )
    for length in options.lengths:
        for title, names, how in CASES:
            print(f"n = {length}, {title}")
            with torch.set_grad_enabled(how["grad"]):
                runs = attention.runs(names, length, **how)
                for found in interleaved(runs, "plain SDPA", options.rounds):
                    spread = f"{found.ratio:5.2f} ({found.low:.2f} to {found.high:.2f})"
                    print(f"  {found.name:<16} {found.milliseconds:8.1f} ms   {spread}")
            print()


if __name__ == "__main__":
    main()
