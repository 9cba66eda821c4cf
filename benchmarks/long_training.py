"""Longer inputs with little training: quality and compute of ways to 4x, on short or long rows: LONG_TRAINING.md.

Rerun the command to resume:

    HF_POSENC_CHECKPOINTS=DIR python -m benchmarks.long_training
"""

from __future__ import annotations

import dataclasses
import json
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

import hf_posenc
from hf_posenc.training import (
    DataCollatorWithPoSE,
    LossWeights,
    Teacher,
    closed_form_start,
    record_hidden_states,
    transformer_layers,
)

from .extension import LENGTHS, STORIES, TRAINED_LENGTH
from .recovery.tasks import load_stories, story_rows
from .recovery.trial import WARMUP_RATIO, start_worker

HERE = Path(__file__).parent
RESULTS, PAGE = HERE / "long_training.json", HERE / "LONG_TRAINING.md"
TARGET_LENGTH, STEPS, FIT_STEPS = 4 * TRAINED_LENGTH, 142, 30
CLOSED_FORM_ROWS, FIT_LENGTH, FIT_ROWS = 12, 128, 2
YARN: dict[str, Any] = {"type": "rope", "scaling": {"rope_type": "yarn", "factor": 4.0}}


@dataclasses.dataclass(frozen=True)
class Run:
    """One way to train: a scheme, the rows, one per step, and where its targets come from."""

    scheme: Any
    length: int = TRAINED_LENGTH
    steps: int = STEPS
    learning_rate: float = 5e-4
    pose: bool = False
    teacher: bool = False
    """Start from the original's attention, and learn from its predictions and hidden states."""

    def execute(self) -> dict[str, Any]:
        """Train from the original checkpoint, and measure perplexity at each length."""
        torch.manual_seed(0)
        model, start = hf_posenc.retrofit(load_stories(), self.scheme), time.process_time()
        rows = _text(train=True)
        rows = rows[: len(rows) // self.length * self.length].view(-1, self.length)
        if self.teacher:
            stock_model = load_stories().eval()
            orders = closed_form_start(stock_model, model, rows[:CLOSED_FORM_ROWS, :FIT_LENGTH])
            fit_rows = rows[: FIT_STEPS * FIT_ROWS, :FIT_LENGTH]
            options = {"projections": True, "steps": FIT_STEPS, "rows": FIT_ROWS, "head_orders": orders}
            hf_posenc.fit(stock_model, model, fit_rows, **options)
        for _ in self._train(model, rows):
            pass
        seconds = time.process_time() - start
        return {"tokens": self.steps * self.length, "cpu_seconds": round(seconds), "quality": measure(model.eval())}

    def _train(self, model: Any, rows: torch.Tensor) -> Iterator[None]:
        teacher = Teacher(load_stories()) if self.teacher else None
        collator = DataCollatorWithPoSE(TARGET_LENGTH, seed=0) if self.pose else None
        optimizer = torch.optim.AdamW(model.parameters(), self.learning_rate, betas=(0.9, 0.98), weight_decay=0.0)
        warmup = max(round(WARMUP_RATIO * self.steps), 1)
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: min((step + 1) / warmup, 1) * (0.51 + 0.49 * math.cos(math.pi * step / self.steps))
        )
        model.train()
        order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))
        assert self.steps <= len(order), "every row is used once at most"
        for step in range(self.steps):
            row = rows[order[step]]
            inputs = collator([{"input_ids": row}]) if collator is not None else {"input_ids": row[None]}
            if teacher is None:
                loss = model(**inputs, labels=row[None]).loss
            else:
                target = teacher.forward({"input_ids": row[None]})
                with record_hidden_states(transformer_layers(model)) as hidden_states:
                    logits = model(**inputs).logits
                weights = LossWeights(hidden=LossWeights().hidden * (1 - step / self.steps))
                loss = torch.stack(list(target.losses(weights, logits, hidden_states).values())).sum()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            yield


RUNS = {
    "rows of 2,048 tokens": Run("rope", length=TARGET_LENGTH),
    "PoSE, rows of 512 tokens": Run("rope", pose=True),
    "rows of 512 tokens": Run("rope"),
    "DroPE, from the original": Run("none", steps=2 * STEPS, learning_rate=1e-3, teacher=True),
    "DroPE, from text": Run("none", steps=2 * STEPS, learning_rate=1e-3),
    "YaRN and PoSE, rows of 512 tokens": Run(YARN, pose=True),
    "YaRN, rows of 2,048 tokens": Run(YARN, length=TARGET_LENGTH),
}
"""All runs by name, the most informative first."""


def _text(train: bool) -> torch.Tensor:
    """The stories one after the other: those that benchmarks/extension.py reads, or the others, to train on."""
    stories = story_rows()["input_ids"]
    return (stories[STORIES:] if train else stories[:STORIES]).flatten()


def measure(model: Any) -> dict[str, dict[str, Any]]:
    """Perplexity by multiple of the trained length, on the text of benchmarks/extension.py."""
    report = hf_posenc.evaluate({"model": model}, _text(train=False), lengths=LENGTHS, progress=False)
    return {
        multiple: {"perplexity": row.perplexity.value, "interval": list(row.perplexity.confidence_interval)}
        for multiple, row in zip(LENGTHS, report.perplexity, strict=True)
    }


HEADER = ["trained on", *(f"perplexity, {multiple}" for multiple in LENGTHS), "tokens", "CPU seconds"]


def quality_table(results: dict[str, Any]) -> list[list[str]]:
    """A row per run: perplexity at each length, and what the training took."""
    rows = []
    for name in RUNS:
        if name not in results:
            rows.append([name, *["not yet run"] * len(LENGTHS), "", ""])
            continue
        result = results[name]
        cells = [f"{result['quality'][multiple]['perplexity']:.2f}" for multiple in LENGTHS]
        rows.append([name, *cells, f"{result['tokens']:,}", str(result["cpu_seconds"])])
    return rows


def render_page(results: dict[str, Any]) -> str:
    """The results as Markdown."""
    measured = {name: results[name]["quality"]["4x"]["interval"] for name in RUNS if name in results}
    lines = [
        "# Longer inputs with little training",
        "",
        "Generated by `python -m benchmarks.long_training`; do not edit.",
        "",
    ]
    lines += [
        f"stories260k (a LLaMA with 260,000 parameters, trained on {TRAINED_LENGTH} tokens) is trained on stories",
        "that it generated itself (concatenated, one row per step). With PoSE, the positions of short rows jump,",
        f"up to {TARGET_LENGTH:,}. DroPE drops the rotation and learns from text, or from the original's attention,",
        "predictions and hidden states. Perplexity is measured on other generated stories, the same as in",
        "[EXTENSION.md](EXTENSION.md), in windows of 1, 2 and 4 times the trained length. CPU seconds are those of",
        "training, on one thread of a busy machine. There is one seed, and one learning rate",
        f"({RUNS['DroPE, from text'].learning_rate:g} for DroPE, {Run('rope').learning_rate:g} for the others).",
        "",
        f"| {' | '.join(HEADER)} |",
        f"|{' --- |' * len(HEADER)}",
        *(f"| {' | '.join(row)} |" for row in quality_table(results)),
        "",
        "Intervals (95%) of the perplexity at 4x: "
        + "; ".join(f"{name} {low:.2f} to {high:.2f}" for name, (low, high) in measured.items())
        + ".",
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    start_worker()
    results: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for name, run in RUNS.items():
        if name not in results:
            results[name] = run.execute()
            RESULTS.write_text(json.dumps(results, indent=1) + "\n")
            print(name, results[name], flush=True)
    PAGE.write_text(render_page(results))


if __name__ == "__main__":
    main()
