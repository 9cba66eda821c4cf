"""A small GPT-2 with learned positions, trained on characters of Shakespeare, for benchmarks/long_training.py."""

from __future__ import annotations

import math

import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

from .recovery.tasks import CACHE, data_path

TRAINED_LENGTH, LAYERS, WIDTH, HEADS = 128, 2, 96, 4
STEPS, ROWS_PER_STEP, LEARNING_RATE, WARMUP = 1000, 32, 4e-3, 50
HELD_OUT = 32_768
DESCRIPTION = [
    f"A GPT-2 ({LAYERS} layers, width {WIDTH}) learns characters of Shakespeare's plays in {STEPS:,} steps of",
    f"{ROWS_PER_STEP} rows of {TRAINED_LENGTH}. Its position table is then interpolated to {4 * TRAINED_LENGTH:,}",
    "positions, and the model is trained on, as above.",
]


def text(train: bool) -> torch.Tensor:
    """The characters as numbers: the end of the text, which is held out, or all before it."""
    characters = data_path("data", "tinyshakespeare", "input.txt").read_text(encoding="utf-8")
    numbers = {character: number for number, character in enumerate(sorted(set(characters)))}
    ids = torch.tensor([numbers[character] for character in characters])
    return ids[:-HELD_OUT] if train else ids[-HELD_OUT:]


def load() -> GPT2LMHeadModel:
    """The model, trained the first time and then cached."""
    directory = CACHE / f"shakespeare-gpt2-{LAYERS}-{WIDTH}-{TRAINED_LENGTH}-{STEPS}"
    if not (directory / "config.json").is_file():
        _train().save_pretrained(directory)
    model: GPT2LMHeadModel = GPT2LMHeadModel.from_pretrained(directory)
    return model


def _train() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    ids, generator = text(train=True), torch.Generator().manual_seed(0)
    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=int(ids.max()) + 1,
            n_embd=WIDTH,
            n_layer=LAYERS,
            n_head=HEADS,
            n_positions=TRAINED_LENGTH,
            attn_pdrop=0.0,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            bos_token_id=None,
            eos_token_id=None,
        )
    )
    optimizer = torch.optim.AdamW(model.parameters(), LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / WARMUP, 1) * (0.51 + 0.49 * math.cos(math.pi * step / STEPS))
    )
    model.train()
    for _ in range(STEPS):
        starts = torch.randint(len(ids) - TRAINED_LENGTH, (ROWS_PER_STEP,), generator=generator)
        batch = torch.stack([ids[start : start + TRAINED_LENGTH] for start in starts.tolist()])
        loss = model(batch, labels=batch).loss
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    return model
