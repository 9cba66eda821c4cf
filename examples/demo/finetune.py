"""Convert the stock model to another scheme and fine-tune it with `hf-posenc train`."""

from __future__ import annotations

import dataclasses
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import torch

from .pretrain import BATCH_SIZE, TRAINED_LENGTH
from .text import TextFiles

LONG_LENGTH = 4 * TRAINED_LENGTH
"""Row length of the last quarter of the steps. The teacher cannot read rows that long, so these train on the text."""
EVALUATIONS = 8


@dataclasses.dataclass(frozen=True)
class CurvePoint:
    """Validation perplexity after a number of tokens."""

    tokens: int
    perplexity: float


def finetune(scheme: str, stock: Path, texts: TextFiles, steps: int, output_dir: Path) -> list[CurvePoint]:
    """Train a variant with the recommended recipe; return its validation curve, starting right after the swap."""
    short, long = stages(steps)
    command = [
        *("--cpu", "--num_processes", "1", "--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"),
        *("--num_cpu_threads_per_process", str(torch.get_num_threads())),
        *("-m", "hf_posenc", "train", "--model", str(stock), "--scheme", scheme, "--data", str(texts.train)),
        *("--train-length", f"{TRAINED_LENGTH}:{short},{LONG_LENGTH}:{long}"),
        *("--output-dir", str(output_dir), "--restart"),
        *("--max-steps", str(steps), "--per-device-train-batch-size", str(BATCH_SIZE), "--save-steps", str(steps)),
        *("--eval-data", str(texts.validation), "--eval-on-start", "--eval-strategy", "steps"),
        *("--eval-steps", str(max(steps // EVALUATIONS, 1)), "--per-device-eval-batch-size", "8"),
        *("--report-to", "none", "--disable-tqdm", "false", "--dataloader-pin-memory", "false"),
    ]
    print(f"      $ accelerate launch {shlex.join(command)}", flush=True)
    log = output_dir.with_suffix(".log")
    with log.open("w", encoding="utf-8") as file:
        done = subprocess.run(
            [sys.executable, "-m", "accelerate.commands.launch", *command],
            stdout=file,  # losses; progress bars and errors go to the terminal
            env={**os.environ, "TRANSFORMERS_VERBOSITY": "error"},
            check=False,
        )
    if done.returncode:
        raise SystemExit(f"Training {scheme} failed, see the error above; its log is {log}")
    return _read_curve(output_dir / f"checkpoint-{steps}" / "trainer_state.json", steps)


def stages(steps: int) -> tuple[int, int]:
    """Split the steps into those on rows of the trained length and those on longer rows."""
    long = max(steps // 4, 1)
    return steps - long, long


def tokens_at(step: int, steps: int) -> int:
    """Tokens seen up to a step."""
    short, _ = stages(steps)
    return BATCH_SIZE * (min(step, short) * TRAINED_LENGTH + max(step - short, 0) * LONG_LENGTH)


def _read_curve(trainer_state: Path, steps: int) -> list[CurvePoint]:
    history = json.loads(trainer_state.read_text(encoding="utf-8"))["log_history"]
    evaluations = [entry for entry in history if "eval_perplexity" in entry]
    return [CurvePoint(tokens_at(entry["step"], steps), entry["eval_perplexity"]) for entry in evaluations]
