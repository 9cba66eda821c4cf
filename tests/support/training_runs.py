"""Shared by the tests of training: short training runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import TrainingArguments

from hf_posenc.training import TrainRequest

LENGTH = 16


def settings(directory: Path, **changes: Any) -> TrainingArguments:
    common = {
        "max_steps": 6,
        "per_device_train_batch_size": 4,
        "learning_rate": 3e-3,
        "logging_steps": 1,
        "save_steps": 2,
        "use_cpu": True,
        "disable_tqdm": True,
        "report_to": "none",
    }
    return TrainingArguments(output_dir=str(directory), **{**common, **changes})


def request(model: Path, data: Any, **changes: Any) -> TrainRequest:
    return TrainRequest(model=str(model), data=str(data), **{"scheme": "t5", "train_length": str(LENGTH), **changes})


def losses_in(directory: Path) -> list[float]:
    state = json.loads((directory / "checkpoint-6" / "trainer_state.json").read_text())
    # The hidden-state loss fades out, so the total falls even if nothing is learned.
    return [entry.get("kl_loss", entry["loss"]) for entry in state["log_history"] if "loss" in entry]


def files_in(directory: Path) -> set[str]:
    return {path.name for path in directory.rglob("*") if path.is_file()}


def weights(directory: Path) -> dict[str, torch.Tensor]:
    return load_file(directory / "model.safetensors")
