"""What the recipe reaches with 30 thousand tokens, and what each of its pieces contributes: SMALL_BUDGETS.md.

stories260k learns a new encoding from 117 rows of 256 tokens, one row a step. Rerun the command to resume:

    HF_POSENC_CHECKPOINTS=DIR python -m benchmarks.recovery.small_budgets
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from tqdm.auto import tqdm

import hf_posenc
from hf_posenc.plots.style import COLORS, MARKERS, subplots
from hf_posenc.training import Recipe, closed_form_start, default_learning_rate
from hf_posenc.training.recipes import NAIVE, RECOMMENDED

from .results import scheme_label
from .tasks import STORIES, Batch
from .trial import Trial, start_worker, train_steps

HERE = Path(__file__).parent
RESULTS, PAGE, FIGURE = HERE / "small_budgets.json", HERE.parent / "SMALL_BUDGETS.md", HERE / "small_budgets.png"
Results = dict[str, dict[str, float]]
FURTHER_SEEDS = (1, 2)
STEPS = ("swapped", "closed form", "fit", "recipe", "recipe, 3 passes")
LABELS = {
    "swapped": "swapped",
    "closed form": "start without gradients",
    "fit": "attention fit",
    "recipe": "trained, 1 pass",
    "recipe, 3 passes": "trained, 3 passes",
    "naive": "plain fine-tuning instead",
}
ROWS, FIT_ROWS, CLOSED_FORM_ROWS, CLOSED_FORM_LENGTH = 117, 24, 12, 128
SCHEMES: tuple[Any, ...] = (
    "t5",
    {"type": "t5", "shared": False},
    "kerple",
    "alibi",
    {"type": "alibi", "learned": "per_layer"},
)
NAIVE_LEARNING_RATES = (1e-3, 2e-3, 5e-3)
WITHOUT: dict[str, dict[str, Any]] = {
    "reordered heads": {"reorder_heads": False},
    "folded rotation": {"fold_rotation": False},
    "matched biases": {"match_biases": False},
    "attention fit": {"fit_ratio": 0.0},
    "distillation": {"teacher": False},
}


@dataclasses.dataclass(frozen=True)
class Run:
    """One conversion: a recipe with its learning rate, and how often each row is used."""

    scheme: Any
    recipe: Recipe
    learning_rate: float
    passes: int = 1

    def execute(self, seed: int = 0) -> dict[str, float]:
        """The shortfall after each stage, and the time that it took."""
        torch.manual_seed(seed)
        rows, shortfall = _rows(seed), STORIES.measure()
        stock_model, model = STORIES.load(), hf_posenc.retrofit(STORIES.load(), self.scheme).eval()
        result, start = {"swapped": shortfall(model)}, time.monotonic()
        ids, recipe, head_orders = rows["input_ids"], self.recipe, None
        if recipe.starts_from_stock_model:
            text = ids[:CLOSED_FORM_ROWS, :CLOSED_FORM_LENGTH]
            pieces = {name: getattr(recipe, name) for name in ("reorder_heads", "fold_rotation", "match_biases")}
            head_orders = closed_form_start(stock_model, model, text, **pieces)
            result["closed form"] = shortfall(model)
        fit_rows = 0 if recipe.fit_ratio == 0 else FIT_ROWS
        if fit_rows:
            options = {"projections": True, "steps": fit_rows, "rows": 1, "head_orders": head_orders}
            hf_posenc.fit(stock_model, model, ids[:fit_rows], **options)
            result["fit"] = shortfall(model)
        # In a single pass, each row is used once; in several, those of the fit are used again.
        used = {name: values[fit_rows if self.passes == 1 else 0 :] for name, values in rows.items()}
        task = dataclasses.replace(STORIES, batch_size=1)
        trial = Trial(STORIES.name, self.scheme, "small budget", self.learning_rate, seed)
        steps = self.passes * len(used["input_ids"])
        for _ in train_steps(model, stock_model, recipe, task, trial, used, steps):
            pass
        return {**result, "trained": shortfall(model.eval()), "seconds": round(time.monotonic() - start)}


def _rows(seed: int) -> Batch:
    rows = STORIES.rows()
    order = torch.randperm(len(rows["input_ids"]), generator=torch.Generator().manual_seed(seed))[:ROWS]
    return {name: values[order] for name, values in rows.items()}


def planned_runs() -> dict[str, Run]:
    """All runs by name, the most informative first."""
    rate = default_learning_rate(STORIES.load().config)
    runs = {}
    for scheme in SCHEMES:
        label = scheme_label(scheme)
        runs[f"{label}: recipe"] = Run(scheme, RECOMMENDED, rate)
        runs[f"{label}: recipe, 3 passes"] = Run(scheme, RECOMMENDED, rate, passes=3)
        for naive_rate in NAIVE_LEARNING_RATES:
            runs[f"{label}: naive {naive_rate}"] = Run(scheme, NAIVE, naive_rate)
    for scheme in ("t5", "alibi"):
        for piece, changes in WITHOUT.items():
            runs[f"{scheme}: without {piece}"] = Run(scheme, dataclasses.replace(RECOMMENDED, **changes), rate)
    return runs


def further_seeds(results: Results, runs: dict[str, Run]) -> dict[str, tuple[Run, int]]:
    """The rows of the main table with other seeds, and each plain fine-tuning at its best rate."""
    names = [name for name in runs if name.endswith(("recipe", "passes"))]
    names += [best for scheme in SCHEMES if (best := _best_naive(results, scheme_label(scheme))) is not None]
    return {f"{name}, seed {seed}": (runs[name], seed) for seed in FURTHER_SEEDS for name in names}


def _best_naive(results: Results, label: str) -> str | None:
    names = [f"{label}: naive {rate}" for rate in NAIVE_LEARNING_RATES]
    return min((name for name in names if name in results), key=lambda name: results[name]["trained"], default=None)


def _values(results: Results, name: str | None, stage: str) -> list[float]:
    """What was measured at a stage, with every seed."""
    names = [] if name is None else [name, *(f"{name}, seed {seed}" for seed in FURTHER_SEEDS)]
    return [results[name][stage] for name in names if stage in results.get(name, {})]


def _cell(values: list[float]) -> str:
    """The mean, and the range if seeds differ."""
    if not values:
        return ""
    spread = f" ({min(values):.3f} to {max(values):.3f})" if min(values) < max(values) else ""
    return f"{statistics.fmean(values):.3f}{spread}"


def _columns(results: Results, label: str) -> dict[str, list[float]]:
    """The cells of a scheme in the main table."""
    recipe = f"{label}: recipe"
    stages = {"swapped": "swapped", "closed form": "closed form", "fit": "fit", "recipe": "trained"}
    columns = {title: _values(results, recipe, stage) for title, stage in stages.items()}
    columns["recipe, 3 passes"] = _values(results, f"{recipe}, 3 passes", "trained")
    return {**columns, "naive": _values(results, _best_naive(results, label), "trained")}


def render_page(results: Results) -> str:
    """The results as Markdown tables."""
    lines = ["# Small budgets", "", "Generated by `python -m benchmarks.recovery.small_budgets`; do not edit.", ""]
    lines += [
        f"stories260k (a LLaMA with 260,000 parameters) learns a new encoding from {ROWS} rows of 256 tokens that it",
        "generated itself, with one row per step. Cells are shortfalls: how far perplexity on other generated text is",
        "above the original's, as a fraction. They are means over seeds, with their range. The column naive is plain",
        f"fine-tuning at the best of the learning rates {', '.join(map(str, NAIVE_LEARNING_RATES))}. The recipe is",
        "`hf-posenc train --tokens 30000`, with 1 or 3 passes over the rows (its default for so few tokens is 10).",
        "",
    ]
    rows = {scheme_label(scheme): _columns(results, scheme_label(scheme)) for scheme in SCHEMES}
    titles = list(next(iter(rows.values())))
    lines += ["| scheme | " + " | ".join(titles) + " |", "| --- |" + " --- |" * len(titles)]
    lines += [f"| {label} | " + " | ".join(map(_cell, columns.values())) + " |" for label, columns in rows.items()]
    lines += ["", f"![Shortfalls after each step]({FIGURE.relative_to(PAGE.parent).as_posix()})"]
    lines += ["", "The recipe without one of its steps, in one pass, with one seed:", "", "| without | t5 | alibi |"]
    lines.append("| --- | --- | --- |")
    names = {"nothing": "recipe", **{piece: f"without {piece}" for piece in WITHOUT}}
    for piece, name in names.items():
        values = [results.get(f"{scheme}: {name}", {}).get("trained") for scheme in ("t5", "alibi")]
        lines.append(f"| {piece} | " + " | ".join(_cell([] if value is None else [value]) for value in values) + " |")
    return "\n".join(lines) + "\n"


def draw_figure(results: Results, path: Path) -> None:
    """A row per scheme: the shortfall after each step of the recipe, and after plain fine-tuning."""
    rows = {scheme_label(scheme).strip("`"): _columns(results, scheme_label(scheme)) for scheme in SCHEMES}
    figure, (axes,) = subplots(1, 1, 7.0, 0.55 * len(rows) + 1.4)
    for number, columns in enumerate(rows.values()):
        means = {title: statistics.fmean(values) for title, values in columns.items() if values}
        steps = [means[title] for title in STEPS if title in means]
        axes.plot(steps, [number] * len(steps), color="lightgrey", lw=1, zorder=1)
        for index, title in enumerate((*STEPS, "naive")):
            if title in means:
                style = {"color": COLORS[index], "marker": MARKERS[index], "ls": "", "ms": 7}
                axes.plot(means[title], number, **style, label=LABELS[title] if number == 0 else None)
    axes.set(xscale="log", xlabel="perplexity above the original's, as a fraction")
    axes.set_xticks([0.1, 1, 10], ["0.1", "1", "10"])
    axes.set_yticks(range(len(rows)), list(rows), fontsize=8)
    axes.invert_yaxis()
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize=8)
    figure.savefig(path, dpi=110)


def main() -> None:
    start_worker()
    results: Results = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.is_file() else {}
    runs = planned_runs()
    _run_missing(results, {name: (run, 0) for name, run in runs.items()})
    _run_missing(results, further_seeds(results, runs))
    draw_figure(results, FIGURE)


def _run_missing(results: Results, runs: dict[str, tuple[Run, int]]) -> None:
    for name, (run, seed) in tqdm(runs.items(), unit="run", desc="Small budgets"):
        if name not in results:
            results[name] = run.execute(seed)
            RESULTS.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
        PAGE.write_text(render_page(results), encoding="utf-8")


if __name__ == "__main__":
    main()
