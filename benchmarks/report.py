"""Results as a page and as JSON."""

from __future__ import annotations

import dataclasses
import json
import platform
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
import transformers

from .bars import BARS, Figures
from .measure import Measured
from .memory import SAMPLES

HEAD = """# Results

Written by `{command}`; do not edit. What was tried and not taken stands in [LOG.md](LOG.md).

{machine}

Ratios are medians of interleaved rounds, with quartiles; below 1 is faster than the first line of a table, which is
the limit for all of them. How much faster one of two models is, is the quotient of their ratios. Attention alone is 12
heads of 64, whole models are 4 layers of width 768 with 12 heads, all in float32. Work that depends on positions alone
is done once a forward: it is in the figures of whole models, and not in those of attention alone. Memory is the peak
of a fresh process above what it had before, the least of {samples} (of whole models: one). Everything under one
setting and length is of one run; others may be of another, where they were measured again by themselves (`--only`,
`--missing`). Empty places are those of models that write out all weights, which take too long for so many rounds.
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
    found = Path("/proc/cpuinfo")
    return found.read_text().splitlines() if found.exists() else []


def machine_line(facts: dict[str, Any]) -> str:
    return (
        f"{facts['processor']}, {facts['threads']} threads, no GPU; Python {facts['python']}, torch {facts['torch']}, "
        f"transformers {facts['transformers']}."
    )


def table(results: list[Measured]) -> list[str]:
    """One Markdown table for each group and setting, lengths side by side."""
    lines = []
    for (group, setting), found in groupby(
        sorted(results, key=lambda r: (r.group, r.setting)), key=lambda r: (r.group, r.setting)
    ):
        rows = list(found)
        lengths = sorted({row.length for row in rows})
        names = list(dict.fromkeys(row.name for row in rows))
        by_place = {(row.name, row.length): row for row in rows}
        lines += [f"### {group}: {setting}", ""]
        lines.append("| | " + " | ".join(f"n = {length}" if length else "once" for length in lengths) + " |")
        lines.append("| --- |" + " --- |" * len(lengths))
        for name in names:
            cells = [_cell(by_place.get((name, length))) for length in lengths]
            lines.append(f"| {name} | " + " | ".join(cells) + " |")
        lines.append("")
    return lines


def _cell(found: Measured | None) -> str:
    if found is None:
        return ""
    if found.unit == "MB":
        return f"{found.value:.0f} MB"
    if found.ratio == found.low == found.high == 1:
        return f"1 ({found.value:.0f} {found.unit})"
    return f"{found.ratio:.2f} ({found.low:.2f} to {found.high:.2f})"


def bars(results: list[Measured], whole: bool) -> list[str]:
    """The aims, and what was measured; of a whole run also those that it has not measured."""
    figures, lines = Figures(results), []
    for bar in BARS:
        judged = bar.judged(figures)
        if judged is None and whole:
            lines.append(f"| {bar.what} | | not measured | |")
        elif judged is not None:
            sign = "at most" if bar.at_most else "at least"
            lines.append(
                f"| {bar.what} | {sign} {bar.limit:g} | {judged[0]:.2f} | {'yes' if judged[1] else '**no**'} |"
            )
    return ["| what | aim | measured | met |", "| --- | --- | --- | --- |", *lines, ""] if lines else []


def write_page(run: dict[str, Any], path: Path) -> None:
    """The page of a run that was written as JSON, also on another machine."""
    results = [Measured(**result) for result in run["results"]]
    head = HEAD.format(machine=machine_line(run["machine"]), samples=SAMPLES, command=run["command"])
    path.write_text("\n".join([head, "## Aims", "", *bars(results, True), "## Figures", "", *table(results)]))


def write_json(results: list[Measured], command: str, path: Path) -> dict[str, Any]:
    run = {"machine": machine(), "command": command, "results": [dataclasses.asdict(result) for result in results]}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(run, indent=1) + "\n")
    return run
