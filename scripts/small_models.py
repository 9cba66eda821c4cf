"""Small language models for the figures: trained in seconds, on text that every Python brings along."""

from __future__ import annotations

import re
from collections import Counter
from pydoc_data.topics import topics
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GPT2Config

WORDS, WIDTH, LENGTH, ROWS, RATE = 1024, 64, 64, 32, 3e-3


def read_text() -> tuple[torch.Tensor, list[str]]:
    """Python's own help topics as ids of their most frequent words; 0 is any other word."""
    text = " ".join(topics[name] for name in sorted(topics))
    found = re.findall(r"\w+|[^\w\s]", text)
    words = ["?", *(word for word, _ in Counter(found).most_common(WORDS - 1))]
    number = {word: place for place, word in enumerate(words)}
    return torch.tensor([number.get(word, 0) for word in found]), words


def train(scheme: Any, text: torch.Tensor, steps: int, seed: int = 0) -> tuple[Any, float]:
    """A GPT-2 of two layers under a scheme, trained from scratch; and its loss at the end."""
    torch.manual_seed(seed)
    config = GPT2Config(
        vocab_size=WORDS,
        n_embd=WIDTH,
        n_layer=2,
        n_head=4,
        n_positions=LENGTH,
        position_scheme=scheme,
        bos_token_id=None,
        eos_token_id=None,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    model = AutoModelForCausalLM.from_config(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, total_steps=steps)
    losses = []
    for _ in range(steps):
        starts = torch.randint(len(text) - LENGTH, (ROWS,))
        ids = torch.stack([text[start : start + LENGTH] for start in starts.tolist()])
        loss = model(ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    last = losses[-20:]
    return model.eval(), sum(last) / len(last)
