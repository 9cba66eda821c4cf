"""Tables and sentences of docs/choosing.md about inputs beyond the trained length, from results in benchmarks/."""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Callable
from typing import Any

from benchmarks import __main__ as speed
from benchmarks import long_training
from benchmarks.extension import report
from benchmarks.extension.costs import COST_LENGTH
from benchmarks.models import FORGET

Table = tuple[list[str], list[list[str]]]
FORGET_LENGTH = 4096
FORGET_ROWS = {
    ("attention", "causal, forward, forget", "forget"): "a forward pass of attention",
    ("attention", "causal, training step, forget", "forget"): "a training step of attention",
    ("decoding with n cached tokens", "LLaMA with forget, 32 new tokens", FORGET): "a new token of a LLaMA",
}
POSE_RUNS = {
    "stories260K": ("rows of 2,048 tokens", "PoSE, rows of 512 tokens", "rows of 512 tokens"),
    "a small GPT-2 with a position table": (
        "GPT-2: rows of 512 characters",
        "GPT-2: PoSE, rows of 128 characters",
        "GPT-2: rows of 128 characters",
    ),
}
"""For each model: long rows, short rows with PoSE, and the same rows without it."""


def _extension() -> dict[str, Any]:
    return json.loads(report.RESULTS.read_text(encoding="utf-8"))


def _training() -> dict[str, Any]:
    return json.loads(long_training.RESULTS.read_text(encoding="utf-8"))


def stories_table() -> Table:
    """Quality and cost of ways to four times the length on stories260k: no training, then training runs."""
    results = _extension()
    rows = []
    for name, quality in results["quality"].items():
        perplexities = [f"{quality[multiple]['perplexity']:.2f}" for multiple in report.LENGTHS]
        rows.append([f"no training: {name}", *perplexities, "none", "", *report.cost_cells(results, name)])
    for name, *cells in long_training.quality_table(_training(), long_training.LLAMA_RUNS):
        amount = "full" if long_training.RUNS[name].length == long_training.TARGET_LENGTH else "little"
        rows.append([f"{amount} training: {name}", *(re.sub(r" \(.*\)", "", cell) for cell in cells), "", "", ""])
    titles = ["training tokens", "CPU seconds", "cost of attention", "in training", "cost of a new token"]
    return ["", *long_training.HEADER[1:-2], *titles], rows


def llm_table() -> Table:
    """Quality of methods without training on SmolLM2-135M."""
    return ["", *report.LLM_HEADER[1:]], report.llm_table(_extension())


def gpt2_table() -> Table:
    """Quality of ways to train a GPT-2 with a position table for four times its length."""
    rows = long_training.quality_table(_training(), long_training.GPT2_RUNS)
    titles = ["", *long_training.HEADER[1:-2], "training characters", "CPU seconds"]
    return titles, [[name.removeprefix("GPT-2: "), *cells] for name, *cells in rows]


def new_token_sentence() -> str:
    """What a new token costs with methods that remap distances."""
    costs = _extension().get("decoding")
    if not costs:
        return "The cost of these methods per new token with a cache was not measured."
    ratios = [cost["ratio"] for name, cost in costs.items() if name != "plain"]
    return (
        f"With {COST_LENGTH:,} cached tokens, a new token takes {min(ratios):.2f} to {max(ratios):.2f} times the CPU\n"
        "time of the stock model with these methods."
    )


def training_cost_sentence() -> str:
    """What attention costs in training with methods that remap distances."""
    costs = _extension().get("training")
    if not costs:
        return "- The cost of these methods in training was not measured."
    ratios = [cost["ratio"] for name, cost in costs.items() if name != "plain"]
    return (
        f"- In training, their attention takes {min(ratios):.1f} to {max(ratios):.1f} times the CPU time of plain\n"
        "  attention: they are meant for models that are not trained further."
    )


def forget_sentence() -> str:
    """What `forget` costs in attention and per new token."""
    results = json.loads(speed.RESULTS.read_text(encoding="utf-8"))["results"]
    ratios = {
        (row["group"], row["setting"], row["name"]): row["ratio"] for row in results if row["length"] == FORGET_LENGTH
    }
    cells = [f"{label} takes {ratios[key]:.2f}" for key, label in FORGET_ROWS.items() if key in ratios]
    if not cells:
        return "`forget` was not timed."
    return (
        f"With `forget` at {FORGET_LENGTH:,} tokens, {', '.join(cells)} times as long as plain\n"
        "attention or the stock model."
    )


def pose_sentences() -> str:
    """Short rows with PoSE, compared with rows of the target length."""
    sentences = []
    for subject, names in POSE_RUNS.items():
        long, short, *_ = runs = [long_training.results_of(_training(), name) for name in names]
        if not all(runs):
            sentences.append(f"- On {subject}, PoSE was not measured.")
            continue
        perplexities = [statistics.mean(run["quality"]["4x"]["perplexity"] for run in seeds) for seeds in runs]
        above, without = (perplexity / perplexities[0] - 1 for perplexity in perplexities[1:])
        seconds = [statistics.median(run["cpu_seconds"] for run in seeds) for seeds in (short, long)]
        tokens, time, count = short[0]["tokens"] / long[0]["tokens"], seconds[0] / seconds[1], min(map(len, runs))
        sentences.append(
            f"- On {subject}, PoSE on short rows ends with a perplexity {above:.1%} above that of\n"
            "  training on long rows, measured at four times the length, for\n"
            f"  {tokens:.0%} of the tokens and {time:.0%} of the CPU time. Without PoSE, training on short\n"
            f"  rows ends {without:.1%} above ({count} {'seeds' if count > 1 else 'seed'})."
        )
    return "\n".join(sentences)


TABLES: dict[str, Callable[[], Table]] = {"stories": stories_table, "llm": llm_table, "gpt2": gpt2_table}
SENTENCES: dict[str, Callable[[], str]] = {
    "new-token": new_token_sentence,
    "training-cost": training_cost_sentence,
    "forget": forget_sentence,
    "pose": pose_sentences,
}
