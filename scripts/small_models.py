"""Small language models for the figures: trained in seconds, on text that ships with Python."""

from __future__ import annotations

import re
from collections import Counter
from pydoc_data.topics import topics
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GPT2Config

VOCABULARY, WIDTH, LENGTH, ROWS, RATE = 1024, 64, 64, 32, 3e-3


def read_text() -> tuple[torch.Tensor, list[str]]:
    """Tokenize Python's help topics by word; all but the most frequent words have id 0."""
    text = " ".join(topics[name] for name in sorted(topics))
    tokens = re.findall(r"\w+|[^\w\s]", text)
    words = ["?", *(word for word, _ in Counter(tokens).most_common(VOCABULARY - 1))]
    ids = {word: index for index, word in enumerate(words)}
    return torch.tensor([ids.get(word, 0) for word in tokens]), words


def train(scheme: Any, text: torch.Tensor, steps: int, seed: int = 0, rows: int = ROWS) -> tuple[Any, float]:
    """Train a two-layer GPT-2 with a scheme from scratch; return it with its final loss."""
    torch.manual_seed(seed)
    config = GPT2Config(
        vocab_size=VOCABULARY,
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
        starts = torch.randint(len(text) - LENGTH, (rows,))
        ids = torch.stack([text[start : start + LENGTH] for start in starts.tolist()])
        loss = model(ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    last = losses[-20:]
    return model.eval(), sum(last) / len(last)
