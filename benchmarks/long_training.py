"""Longer inputs with little training: quality and compute of ways to 4x, on short or long rows: LONG_TRAINING.md.

Runs in the results file are not repeated:

    HF_POSENC_CHECKPOINTS=DIR python -m benchmarks.long_training [--only 'GPT-2*'] [--estimate]
"""

from __future__ import annotations

import argparse
import dataclasses
import fnmatch
import json
import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
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

from . import long_training_gpt2
from .extension.stories import LENGTHS, STORIES, TRAINED_LENGTH
from .recovery.tasks import load_stories, story_rows
from .recovery.trial import WARMUP_RATIO, start_worker

HERE = Path(__file__).parent
RESULTS, PAGE = HERE / "long_training.json", HERE / "LONG_TRAINING.md"
EXTENSION, STEPS, FIT_STEPS = 4, 142, 30
TARGET_LENGTH = EXTENSION * TRAINED_LENGTH
CLOSED_FORM_ROWS, FIT_LENGTH, FIT_ROWS = 12, 128, 2
WITH_SEEDS = 3
QUARTER_COMPUTE_STEPS = 256
"""Steps of the GPT-2 on short rows that take a quarter of the compute of 200 on rows of four times the length. A token
of a long row costs 1.3 times that of a short one, because its attention reads four times as many keys."""
YARN: dict[str, Any] = {"type": "rope", "scaling": {"rope_type": "yarn", "factor": float(EXTENSION)}}


@dataclasses.dataclass(frozen=True)
class Subject:
    """A model, and text to train and to evaluate it on."""

    trained_length: int
    load: Callable[[], Any]
    text: Callable[[bool], torch.Tensor]

    @property
    def target_length(self) -> int:
        return EXTENSION * self.trained_length

    def measure(self, model: Any) -> dict[str, dict[str, Any]]:
        """Perplexity by multiple of the trained length."""
        report = hf_posenc.evaluate(
            {"model": model}, self.text(False), lengths=LENGTHS, trained_length=self.trained_length, progress=False
        )
        return {
            multiple: {"perplexity": row.perplexity.value, "interval": list(row.perplexity.confidence_interval)}
            for multiple, row in zip(LENGTHS, report.perplexity, strict=True)
        }


def story_text(train: bool) -> torch.Tensor:
    """The stories one after the other: those that benchmarks/extension reads, or the others, to train on."""
    stories = story_rows()["input_ids"]
    return (stories[STORIES:] if train else stories[:STORIES]).flatten()


LLAMA = Subject(TRAINED_LENGTH, lambda: load_stories(), story_text)
GPT2 = Subject(long_training_gpt2.TRAINED_LENGTH, long_training_gpt2.load, long_training_gpt2.text)


@dataclasses.dataclass(frozen=True)
class Run:
    """One way to train: a scheme, the rows, and where their targets come from."""

    scheme: Any
    length: int = TRAINED_LENGTH
    steps: int = STEPS
    rows_per_step: int = 1
    learning_rate: float = 5e-4
    pose: bool = False
    teacher: bool = False
    """Start from the original's attention, and learn from its predictions and hidden states."""
    subject: Subject = LLAMA
    seeds: int = 1

    @property
    def tokens(self) -> int:
        return self.steps * self.rows_per_step * self.length

    def execute(self, seed: int = 0) -> dict[str, Any]:
        """Train from the original checkpoint, and measure perplexity at each length."""
        torch.manual_seed(seed)
        model, start = hf_posenc.retrofit(self.subject.load(), self.scheme), time.process_time()
        rows = self._rows()
        if self.teacher:
            stock_model = self.subject.load().eval()
            orders = closed_form_start(stock_model, model, rows[:CLOSED_FORM_ROWS, :FIT_LENGTH])
            fit_rows = rows[: FIT_STEPS * FIT_ROWS, :FIT_LENGTH]
            options = {"projections": True, "steps": FIT_STEPS, "rows": FIT_ROWS, "head_orders": orders}
            hf_posenc.fit(stock_model, model, fit_rows, **options)
        for _ in self._train(model, rows, seed):
            pass
        seconds = time.process_time() - start
        quality = self.subject.measure(model.eval())
        return {"tokens": self.tokens, "cpu_seconds": round(seconds), "quality": quality}

    def estimate(self) -> float:
        """CPU seconds of the training, from those of its second step."""
        training = self._train(hf_posenc.retrofit(self.subject.load(), self.scheme), self._rows(), 0)
        next(training)
        start = time.process_time()
        next(training)
        return self.steps * (time.process_time() - start)

    def _rows(self) -> torch.Tensor:
        text = self.subject.text(True)
        return text[: len(text) // self.length * self.length].view(-1, self.length)

    def _train(self, model: Any, rows: torch.Tensor, seed: int) -> Iterator[None]:
        if not self.steps:
            return
        teacher = Teacher(self.subject.load()) if self.teacher else None
        collator = DataCollatorWithPoSE(self.subject.target_length, seed=seed) if self.pose else None
        optimizer = torch.optim.AdamW(model.parameters(), self.learning_rate, betas=(0.9, 0.98), weight_decay=0.0)
        warmup = max(round(WARMUP_RATIO * self.steps), 1)
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: min((step + 1) / warmup, 1) * (0.51 + 0.49 * math.cos(math.pi * step / self.steps))
        )
        model.train()
        order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))
        assert self.steps * self.rows_per_step <= len(order), "every row is used once at most"
        for step, chosen in enumerate(order.split(self.rows_per_step)[: self.steps]):
            batch = rows[chosen]
            inputs = {"input_ids": batch} if collator is None else collator([{"input_ids": row} for row in batch])
            if teacher is None:
                loss = model(**inputs, labels=batch).loss
            else:
                target = teacher.forward({"input_ids": batch})
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


def _gpt2(**changes: Any) -> Run:
    """A GPT-2 whose table is interpolated to the target length."""
    table = {"type": "learned", "max_positions": GPT2.target_length, "extend": "interpolate"}
    settings: dict[str, Any] = {"length": GPT2.trained_length, "steps": 200, "rows_per_step": 8, "learning_rate": 1e-3}
    return Run(**{"scheme": table, **settings, "subject": GPT2, "seeds": WITH_SEEDS, **changes})


LLAMA_RUNS = {
    "rows of 2,048 tokens": Run("rope", length=TARGET_LENGTH, seeds=WITH_SEEDS),
    "PoSE, rows of 512 tokens": Run("rope", pose=True, seeds=WITH_SEEDS),
    "rows of 512 tokens": Run("rope", seeds=WITH_SEEDS),
    "DroPE, from the original": Run("none", steps=2 * STEPS, learning_rate=1e-3, teacher=True),
    "DroPE, from text": Run("none", steps=2 * STEPS, learning_rate=1e-3),
    "YaRN and PoSE, rows of 512 tokens": Run(YARN, pose=True),
    "YaRN, rows of 2,048 tokens": Run(YARN, length=TARGET_LENGTH),
}
GPT2_RUNS = {
    "GPT-2: rows of 512 characters": _gpt2(length=GPT2.target_length),
    "GPT-2: PoSE, rows of 128 characters": _gpt2(pose=True, steps=QUARTER_COMPUTE_STEPS),
    "GPT-2: rows of 128 characters": _gpt2(),
    "GPT-2: not trained": _gpt2(steps=0, seeds=1),
}
RUNS = LLAMA_RUNS | GPT2_RUNS
"""All runs by name, the most informative first."""


def result_key(name: str, seed: int) -> str:
    """The name of a run in the results file."""
    return f"{name}, seed {seed}" if seed else name


def results_of(results: dict[str, Any], name: str) -> list[dict[str, Any]]:
    """The results of all seeds of a run."""
    keys = [result_key(name, seed) for seed in range(RUNS[name].seeds)]
    return [results[key] for key in keys if key in results]


HEADER = ["trained on", *(f"perplexity, {multiple}" for multiple in LENGTHS), "tokens", "CPU seconds"]


def quality_table(results: dict[str, Any], names: Iterable[str] = LLAMA_RUNS) -> list[list[str]]:
    """A row per run: perplexity at each length, as a mean over seeds, and what the training took."""
    rows = []
    for name in names:
        measured = results_of(results, name)
        if not measured:
            rows.append([name, *["not yet run"] * len(LENGTHS), "", ""])
            continue
        cells = []
        for multiple in LENGTHS:
            values = [result["quality"][multiple]["perplexity"] for result in measured]
            spread = f" ({min(values):.2f} to {max(values):.2f})" if len(values) > 1 else ""
            cells.append(f"{statistics.mean(values):.2f}{spread}")
        seconds = statistics.median(result["cpu_seconds"] for result in measured)
        rows.append([name, *cells, f"{measured[0]['tokens']:,}", f"{seconds:.0f}"])
    return rows


def _table(results: dict[str, Any], names: Iterable[str]) -> list[str]:
    rows = quality_table(results, names)
    return [f"| {' | '.join(HEADER)} |", f"|{' --- |' * len(HEADER)}", *(f"| {' | '.join(row)} |" for row in rows)]


def _seed_line(results: dict[str, Any], names: Iterable[str]) -> str:
    counts = {name: len(results_of(results, name)) for name in names}
    several = [f"{name} {count}" for name, count in counts.items() if count > 1]
    return f"Seeds: {'; '.join(several)}; one for all others." if several else "There is one seed."


def render_page(results: dict[str, Any]) -> str:
    """The results as Markdown."""
    measured = {name: results[name]["quality"]["4x"]["interval"] for name in LLAMA_RUNS if name in results}
    lines = [
        "# Longer inputs with little training",
        "",
        "Generated by `python -m benchmarks.long_training`; do not edit.",
        "",
        "With PoSE, the positions of short rows jump, up to four times the trained length. Perplexity is measured on",
        "held-out text, in windows of 1, 2 and 4 times that length. Where there are several seeds, cells are means,",
        "with the range. CPU seconds are those of training, on one thread of a busy machine.",
        "",
        "## LLaMA",
        "",
    ]
    lines += [
        f"stories260k (a LLaMA with 260,000 parameters, trained on {TRAINED_LENGTH} tokens) is trained on stories",
        "that it generated itself (concatenated, one row per step). DroPE drops the rotation and learns from text, or",
        "from the original's attention, predictions and hidden states. The held-out stories are the same as in",
        "[EXTENSION.md](EXTENSION.md). There is one learning rate",
        f"({RUNS['DroPE, from text'].learning_rate:g} for DroPE, {Run('rope').learning_rate:g} for the others).",
        _seed_line(results, LLAMA_RUNS),
        "",
        *_table(results, LLAMA_RUNS),
        "",
        "Intervals (95%) of the perplexity at 4x, first seed: "
        + "; ".join(f"{name} {low:.2f} to {high:.2f}" for name, (low, high) in measured.items())
        + ".",
        "",
        "## GPT-2",
        "",
        *long_training_gpt2.DESCRIPTION,
        f"Training has {GPT2_RUNS['GPT-2: rows of 128 characters'].rows_per_step} rows per step.",
        _seed_line(results, GPT2_RUNS),
        "",
        *_table(results, GPT2_RUNS),
    ]
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=["*"], metavar="PATTERN", help="names of runs, such as 'GPT-2*'")
    parser.add_argument("--first-seed", action="store_true", help="leave out all seeds but the first")
    parser.add_argument("--estimate", action="store_true", help="only print how long the runs take")
    options = parser.parse_args(arguments)
    start_worker()
    results: dict[str, Any] = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    missing = [
        (name, seed)
        for name, run in RUNS.items()
        for seed in range(1 if options.first_seed else run.seeds)
        if result_key(name, seed) not in results and any(fnmatch.fnmatchcase(name, pattern) for pattern in options.only)
    ]
    seconds = {name: RUNS[name].estimate() if RUNS[name].steps > 1 else 0.0 for name in dict(missing)}
    for name, seed in missing:
        print(f"{result_key(name, seed)}: about {seconds[name]:.0f} CPU seconds", flush=True)
    for name, seed in [] if options.estimate else missing:
        results[key := result_key(name, seed)] = RUNS[name].execute(seed)
        RESULTS.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
        print(key, results[key], flush=True)
    PAGE.write_text(render_page(results), encoding="utf-8")


if __name__ == "__main__":
    main()
