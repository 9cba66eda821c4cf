"""What a process of the pool does: one trial after the other, on one thread."""

from __future__ import annotations

import torch
from transformers.utils import logging

from .subjects import SUBJECTS
from .trial import Outcome, Trial, run


def start() -> None:
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    logging.disable_progress_bar()


def run_one(trial: Trial) -> Outcome:
    return run(trial, SUBJECTS[trial.subject])
