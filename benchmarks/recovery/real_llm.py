"""Run trials on a real LLM with the command `hf-posenc train`, as a user would. An interrupted run resumes."""

from __future__ import annotations

import hashlib
import json
import shutil
import statistics
import subprocess
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_posenc  # noqa: F401 (loads variants)

from .subjects import Subject
from .tasks import CACHE, data_path, smollm2_directory
from .trial import STAGES, Outcome, Trial, recipe_version

TEST_CHARACTERS, WARM_UP_STEPS, SAVE_STEPS = 32_000, 10, 50
QUESTION = "What is the capital of France?"
METRICS = {"real": "eval_perplexity", "own": "self_generated_perplexity"}


def run_command(trial: Trial, subject: Subject) -> Outcome:
    """Train a variant of SmolLM2, and read its measurements; only those are kept."""
    directory = CACHE / "runs" / hashlib.sha256(trial.key.encode()).hexdigest()[:16]
    if not (directory / "recovery.json").is_file():
        subprocess.run(command(trial, subject, directory), check=True)
    outcome = read_outcome(trial, directory)
    outcome.notes = {"gradient_spike": gradient_spike(directory), "answer": answer(directory)}
    shutil.rmtree(directory)
    return outcome


def command(trial: Trial, subject: Subject, directory: Path) -> list[str]:
    """The command line of a trial. The text to evaluate on is the beginning of the test split."""
    text = data_path("data", "wikitext-2")
    test_file = CACHE / "wikitext-2-test.txt"
    CACHE.mkdir(exist_ok=True)
    test_file.write_text((text / "test.txt").read_text(encoding="utf-8")[:TEST_CHARACTERS], encoding="utf-8")
    options = {
        "model": smollm2_directory(),
        "scheme": json.dumps(trial.scheme),
        "recipe": {"recipe": "recommended"}.get(trial.method, trial.method),
        "data": text / "valid.txt",
        "eval-data": test_file,
        "train-length": subject.length,
        "tokens": trial.tokens,
        "passes": trial.passes,
        "per-device-train-batch-size": trial.batch_size,
        "learning-rate": trial.learning_rate,
        "seed": trial.seed,
        "logging-steps": 1,
        "save-steps": SAVE_STEPS,
        "save-total-limit": 1,
        "report-to": "none",
        "output-dir": directory,
    }
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    return [sys.executable, "-m", "hf_posenc", "train", *words]


def read_outcome(trial: Trial, directory: Path) -> Outcome:
    """What a finished run has measured. The original's perplexity is kept by the run of the recipe only."""
    recovery = json.loads((directory / "recovery.json").read_text(encoding="utf-8"))
    stages = {stage: recovery if stage == "trained" else recovery.get(stage, {}) for stage in ("original", *STAGES)}
    shortfalls = {
        text: {
            stage: stages[stage][metric] / stages["original"][metric] - 1 for stage in STAGES if metric in stages[stage]
        }
        for text, metric in METRICS.items()
    }
    tokens, seen = recovery["tokens_unique"], recovery["tokens_seen"]
    return Outcome(trial, recipe_version(), tokens, seen, recovery["train_seconds"], shortfalls)


def gradient_spike(directory: Path) -> float | None:
    """The largest gradient norm after warm-up, divided by the median of those before it."""
    states = sorted(directory.glob("**/trainer_state.json"), key=lambda path: path.stat().st_mtime)
    if not states:
        return None
    history = json.loads(states[-1].read_text(encoding="utf-8"))["log_history"]
    norms = [entry["grad_norm"] for entry in history if "grad_norm" in entry]
    return max(
        (norms[step] / statistics.median(norms[:step]) for step in range(WARM_UP_STEPS, len(norms))), default=None
    )


@torch.no_grad()
def answer(directory: Path) -> str:
    """What the model answers to a question, greedily."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(directory), AutoTokenizer.from_pretrained(directory)
    messages = [{"role": "user", "content": QUESTION}]
    inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    tokens = model.eval().generate(**inputs, max_new_tokens=24, do_sample=False)
    text: str = tokenizer.decode(tokens[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    return text.strip()
