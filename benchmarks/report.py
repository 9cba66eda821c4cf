"""Write results as JSON and as a Markdown page."""

from __future__ import annotations

import dataclasses
import json
import platform
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
import transformers

from .measure import Measurement
from .memory import SAMPLES
from .targets import TARGETS, Results

INTRODUCTION = """# Benchmark results

Generated from results.json by `{command}`; do not edit. [LOG.md](LOG.md) lists what was tried and rejected.

{machine}

- Each cell is a ratio to the first row of its table: the median of interleaved rounds, with quartiles in parentheses.
  Below 1 is faster than the first row. To compare two other rows, divide their ratios.
- "attention" is one attention call with 12 heads of size 64. Models have 4 layers, width 768 and 12 heads. Everything
  runs in float32. Work that depends on positions only runs once per forward; it is part of the model figures, but not
  of the attention figures.
- Memory is the peak of a fresh process above its level before the call: the lowest of {samples} runs, one run for
  models.
- All rows of one setting and length come from the same run. Different tables may come from different runs (`--only`,
  `--missing`).
- Empty cells: models that materialize all attention weights were too slow to measure there.
"""


def machine() -> dict[str, Any]:
    names = [line.split(":")[1].strip() for line in _cpuinfo() if line.startswith("model name")]
    return {
        "processor": names[0] if names else platform.processor() or platform.machine(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def _cpuinfo() -> list[str]:
    path = Path("/proc/cpuinfo")
    return path.read_text().splitlines() if path.exists() else []


def machine_line(facts: dict[str, Any]) -> str:
    return (
        f"{facts['processor']}, {facts['threads']} threads, no GPU; Python {facts['python']}, torch {facts['torch']}, "
        f"transformers {facts['transformers']}."
    )


def tables(measurements: list[Measurement]) -> list[str]:
    """One Markdown table per group and setting, with a column per length."""

    def setting(measurement: Measurement) -> tuple[str, str]:
        return measurement.group, measurement.setting

    lines = []
    for (group, name), members in groupby(sorted(measurements, key=setting), key=setting):
        rows = list(members)
        lengths = sorted({row.length for row in rows})
        cells = {(row.name, row.length): _cell(row) for row in rows}
        lines += [f"### {group}: {name}", ""]
        lines.append("| | " + " | ".join(f"n = {length}" if length else "time" for length in lengths) + " |")
        lines.append("| --- |" + " --- |" * len(lengths))
        for candidate in dict.fromkeys(row.name for row in rows):
            row_cells = [cells.get((candidate, length), "") for length in lengths]
            lines.append(f"| {candidate} | " + " | ".join(row_cells) + " |")
        lines.append("")
    return lines


def _cell(measurement: Measurement) -> str:
    if measurement.unit == "MB":
        return f"{measurement.value:.0f} MB"
    if measurement.group == "import":
        return f"{measurement.value:.1f} {measurement.unit}"
    if measurement.ratio == measurement.low == measurement.high == 1:
        return f"1 ({measurement.value:.0f} {measurement.unit})"
    return f"{measurement.ratio:.2f} ({measurement.low:.2f} to {measurement.high:.2f})"


def target_table(measurements: list[Measurement], complete: bool) -> list[str]:
    """A row per target; in a complete run also for those that were not measured."""
    results, lines = Results(measurements), []
    for target in TARGETS:
        checked = target.check(results)
        if checked is None and complete:
            lines.append(f"| {target.description} | | not measured | |")
        elif checked is not None:
            bound = f"{'at most' if target.at_most else 'at least'} {target.limit:g}"
            lines.append(f"| {target.description} | {bound} | {checked[0]:.2f} | {'yes' if checked[1] else '**no**'} |")
    return ["| figure | target | measured | met |", "| --- | --- | --- | --- |", *lines, ""] if lines else []


def render_page(run: dict[str, Any]) -> str:
    """The Markdown page of a run that was saved as JSON."""
    measurements = [Measurement(**result) for result in run["results"]]
    introduction = INTRODUCTION.format(machine=machine_line(run["machine"]), samples=SAMPLES, command=run["command"])
    targets = target_table(measurements, complete=True)
    return "\n".join([introduction, "## Targets", "", *targets, "## Measurements", "", *tables(measurements)])


def write_json(measurements: list[Measurement], command: str, path: Path) -> dict[str, Any]:
    results = [dataclasses.asdict(measurement) for measurement in measurements]
    run = {"machine": machine(), "command": command, "results": results}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(run, indent=1) + "\n")
    return run
