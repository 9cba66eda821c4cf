"""From the stock checkpoint to a variant of it, by the command for that: `hf-posenc train` on accelerate."""

from __future__ import annotations

import dataclasses
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import torch

from .stock import ROWS_AT_ONCE, TRAINED_LENGTH
from .text import Texts

LONGER = 4 * TRAINED_LENGTH
"""Rows of the last quarter of the steps: longer than the teacher can read, so that the text is learnt from."""
LOOKS = 8
"""Times that a model is looked at on its way."""


@dataclasses.dataclass(frozen=True)
class Look:
    """How good a model was on the watched text, and how many tokens it had seen by then."""

    tokens: int
    perplexity: float


def recover(scheme: str, stock: Path, texts: Texts, steps: int, directory: Path) -> list[Look]:
    """Train the variant with the recommended recipe; how good it was right after the change, and from then on."""
    short, long = stages(steps)
    command = [
        *("--cpu", "--num_processes", "1", "--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"),
        *("--num_cpu_threads_per_process", str(torch.get_num_threads())),
        *("-m", "hf_posenc", "train", "--model", str(stock), "--scheme", scheme, "--data", str(texts.train)),
        *("--train-length", f"{TRAINED_LENGTH}:{short},{LONGER}:{long}", "--output-dir", str(directory), "--restart"),
        *("--max-steps", str(steps), "--per-device-train-batch-size", str(ROWS_AT_ONCE), "--save-steps", str(steps)),
        *("--eval-data", str(texts.watched), "--eval-on-start", "--eval-strategy", "steps"),
        *("--eval-steps", str(max(steps // LOOKS, 1)), "--per-device-eval-batch-size", "8"),
        *("--report-to", "none", "--disable-tqdm", "false", "--dataloader-pin-memory", "false"),
    ]
    print(f"      $ accelerate launch {shlex.join(command)}", flush=True)
    log = directory.with_suffix(".log")
    with log.open("w", encoding="utf-8") as file:
        done = subprocess.run(
            [sys.executable, "-m", "accelerate.commands.launch", *command],
            stdout=file,  # the losses; bars and errors are seen
            env={**os.environ, "TRANSFORMERS_VERBOSITY": "error"},
            check=False,
        )
    if done.returncode:
        raise SystemExit(f"the training of {scheme} ended with an error, which stands above; its log is {log}")
    return _looks(directory / f"checkpoint-{steps}" / "trainer_state.json", steps)


def stages(steps: int) -> tuple[int, int]:
    """How many of the steps are on rows of the trained length, and how many on longer ones."""
    long = max(steps // 4, 1)
    return steps - long, long


def tokens_at(step: int, steps: int) -> int:
    """Seen until then."""
    short, _ = stages(steps)
    return ROWS_AT_ONCE * (min(step, short) * TRAINED_LENGTH + max(step - short, 0) * LONGER)


def _looks(state: Path, steps: int) -> list[Look]:
    history = json.loads(state.read_text(encoding="utf-8"))["log_history"]
    return [
        Look(tokens_at(entry["step"], steps), entry["eval_perplexity"])
        for entry in history
        if "eval_perplexity" in entry
    ]
