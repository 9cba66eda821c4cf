"""Longer inputs without training: perplexity, passkeys and cost of methods that extend a rotary model: EXTENSION.md.

Two models are measured: stories260k, and SmolLM2-135M, which is skipped if it is not on this machine. Rows in the
results file are not repeated; `--cost` measures the cost again:

    HF_POSENC_CHECKPOINTS=DIR python -m benchmarks.extension [--llm DIRECTORY] [--text FILE] [--estimate]
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from transformers.utils import logging

from ..recovery.tasks import CheckpointMissing
from .costs import Ratios, measure_cost, measure_decoding, measure_training_cost
from .llm import LongInputs, missing_rows, model_directory, text_file
from .report import FIGURE, PAGE, RESULTS, draw_figure, render_page
from .stories import LENGTHS, METHODS, measure_quality


class ResultsFile:
    """Results that are written after each measurement."""

    def __init__(self, path: Path = RESULTS) -> None:
        self.path = path
        self.results: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        for section in ("quality", "cost", "training", "decoding", "llm"):
            self.results.setdefault(section, {})

    def save(self, *message: object) -> None:
        self.path.write_text(json.dumps(self.results, indent=1) + "\n", encoding="utf-8")
        print(*message, flush=True)


def run_costs(file: ResultsFile, again: bool) -> None:
    """Measure what the results lack of the costs, or all of them again."""
    measurements: dict[str, Callable[[], Ratios]] = {
        "cost": measure_cost,
        "training": measure_training_cost,
        "decoding": measure_decoding,
    }
    for section, measure in measurements.items():
        if again or not file.results[section]:
            file.results[section] = measure()
            file.save(section, file.results[section])


def run_stories(file: ResultsFile, methods: list[str]) -> None:
    """Measure the methods that the results lack on stories260k."""
    for name in methods:
        if name not in file.results["quality"]:
            file.results["quality"][name] = measure_quality(name)
            file.save("stories260k,", name, file.results["quality"][name])


def run_llm(file: ResultsFile, inputs: LongInputs, rows: list[tuple[str, str]], estimate_only: bool = False) -> None:
    """Print how long the rows take on SmolLM2-135M, and measure them unless `estimate_only`."""
    minutes = inputs.estimate(rows, file.results["cost"]) if rows else {}
    for (multiple, name), expected in minutes.items():
        print(
            f"SmolLM2-135M, {name}, {multiple} ({inputs.length(multiple):,} tokens): about {expected:.1f} CPU minutes"
        )
    print(f"SmolLM2-135M: {len(rows)} rows, about {sum(minutes.values()):.0f} CPU minutes", flush=True)
    for multiple, name in [] if estimate_only else rows:
        result = inputs.measure(METHODS[name], multiple)
        file.results["llm"].setdefault(name, {})[multiple] = result
        file.save("SmolLM2-135M,", name, multiple, {key: result[key] for key in ("perplexity", "found", "cpu_seconds")})


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cost", action="store_true", help="measure the cost again")
    parser.add_argument("--only", nargs="+", choices=METHODS, default=list(METHODS), metavar="METHOD", help="methods")
    parser.add_argument("--lengths", nargs="+", choices=LENGTHS, default=list(LENGTHS), help="lengths of SmolLM2-135M")
    parser.add_argument("--llm", type=Path, help="directory of SmolLM2-135M (default: HF_POSENC_SMOLLM2)")
    parser.add_argument("--text", type=Path, help="text for SmolLM2-135M (default: WikiText-2's test split)")
    parser.add_argument("--estimate", action="store_true", help="only print how long SmolLM2-135M takes")
    parser.add_argument("--report", action="store_true", help="only write the page and the figure")
    options = parser.parse_args(arguments)
    logging.disable_progress_bar()
    file = ResultsFile()
    if not options.report:
        if not options.estimate:
            run_costs(file, options.cost)
            run_stories(file, options.only)
        try:
            inputs = LongInputs(model_directory(options.llm), text_file(options.text))
        except CheckpointMissing as error:
            print(f"SmolLM2-135M is skipped: {error}")
        else:
            rows = list(missing_rows(file.results["llm"], options.only, options.lengths))
            run_llm(file, inputs, rows, options.estimate)
    PAGE.write_text(render_page(file.results), encoding="utf-8")
    draw_figure(file.results, FIGURE)


if __name__ == "__main__":
    main()
