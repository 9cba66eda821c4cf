"""How to spend a budget of tokens: rows per step, passes over the rows, and the learning rate.

Small budgets run out of steps before they run out of tokens, so a step takes as few rows as possible, and rows are used
several times. benchmarks/LOG.md has the measurements.
"""

from __future__ import annotations

import math
from typing import Any

from transformers import PreTrainedConfig

from ..errors import PosEncError

MIN_STEPS_PER_PASS = 300
MIN_TOKENS_SEEN, MAX_PASSES = 300_000, 10
MIN_WARMUP_STEPS, MAX_WARMUP_FRACTION = 10, 1 / 3
REFERENCE_LEARNING_RATE, REFERENCE_HIDDEN_SIZE, REFERENCE_TOKENS = 1e-3, 64, 256
"""The learning rate that worked best for a model of this width, with steps of this many tokens."""


def budget_arguments(tokens: int, length: int, passes: int | None = None, num_devices: int = 1) -> dict[str, Any]:
    """Training arguments that make the most of a number of tokens.

    Args:
        tokens: How many tokens of text there are, or should be used.
        length: Tokens per row.
        passes: How often each row is used; chosen by the number of tokens if None.
        num_devices: Number of processes.

    Returns:
        Values for `TrainingArguments`: rows per device and step, and the number of epochs.

    Raises:
        PosEncError: If there are not enough tokens for a row per device.

    Example:
        >>> TrainingArguments("out", **budget_arguments(100_000, length=512))
    """
    if tokens < length * num_devices:
        raise PosEncError(f"A budget of {tokens} tokens (--tokens) is less than one row of {length} for every device")
    if passes is not None and passes < 1:
        raise PosEncError(f"--passes must be at least 1, got {passes}")
    rows_per_step = tokens // (MIN_STEPS_PER_PASS * length)
    return {
        "per_device_train_batch_size": max(rows_per_step // num_devices, 1),
        "num_train_epochs": passes or min(max(math.ceil(MIN_TOKENS_SEEN / tokens), 1), MAX_PASSES),
    }


def default_learning_rate(config: PreTrainedConfig, tokens_per_step: int = REFERENCE_TOKENS) -> float:
    """The learning rate for a model: it falls with the square root of the width, and rises with that of the batch."""
    by_width = math.sqrt(REFERENCE_HIDDEN_SIZE / config.hidden_size)
    return REFERENCE_LEARNING_RATE * by_width * math.sqrt(max(tokens_per_step / REFERENCE_TOKENS, 1.0))


def warmup_steps(fraction: float, num_steps: int) -> int:
    """How many steps to warm up: a fraction of the training, but at least ten steps unless the training is short."""
    return min(max(math.ceil(fraction * num_steps), MIN_WARMUP_STEPS), int(MAX_WARMUP_FRACTION * num_steps))
