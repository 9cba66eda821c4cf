"""The evaluations in docs/evaluation.md: of real checkpoints, and of small models trained to copy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModel, AutoModelForCausalLM, GPT2Config

import hf_posenc

VOCABULARY, LENGTH, ROWS, RATE = 64, 64, 32, 3e-3
SCHEMES = {"learned": "learned", "rope": "rope", "alibi": "alibi", "t5": {"type": "t5", "init": "paper"}}


def train_copy_model(scheme: Any, steps: int, seed: int = 0) -> tuple[Any, float]:
    """Train a two-layer GPT-2 to repeat a random sequence; return it with its final loss on the repeated part."""
    torch.manual_seed(seed)
    sizes = {"vocab_size": VOCABULARY, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": LENGTH}
    quiet = {"bos_token_id": None, "eos_token_id": None, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    model = AutoModelForCausalLM.from_config(GPT2Config(position_scheme=scheme, **sizes, **quiet)).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, total_steps=steps)
    losses = []
    for _ in range(steps):
        # The period varies, because copying from a fixed distance would not need retrieval.
        period = int(torch.randint(8, LENGTH // 2 + 1, ()))
        ids = torch.randint(VOCABULARY, (ROWS, period)).repeat(1, -(-LENGTH // period))[:, :LENGTH]
        labels = ids.clone()
        labels[:, :period] = -100
        loss = model(ids, labels=labels).loss
        loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return model.eval(), sum(losses[-20:]) / 20


def evaluate_passkeys(models: dict[str, Any]) -> Any:
    text = torch.randint(VOCABULARY, (4096,), generator=torch.Generator().manual_seed(1))
    settings = {"lengths": ["0.5x", "1x", "2x", "4x", "8x"], "metrics": ["passkey"], "passkey_trials": 20}
    return hf_posenc.evaluate(models, text, **settings, progress=False)


def evaluate_lengths(directory: str, data: Path, tokens: int) -> Any:
    """Evaluate a LLaMA as it is, with untrained alibi, and with a learned table added to its rope."""
    with_table = ["rope", {"type": "learned", "max_positions": 1024}]
    schemes = {"stock": None, "stock + table of 1,024": with_table, "alibi, not trained": "alibi"}
    models = {
        name: AutoModelForCausalLM.from_pretrained(directory, **({} if scheme is None else {"position_scheme": scheme}))
        for name, scheme in schemes.items()
    }
    lengths = ["0.5x", "1x", "2x", "4x", "8x", "16x"]
    settings: dict[str, Any] = {"tokenizer": directory, "max_tokens": tokens, "progress": False}
    by_length = hf_posenc.evaluate(models, data, lengths=lengths, **settings)
    by_order = hf_posenc.evaluate(models, data, lengths=["0.5x"], metrics=["order"], **settings)
    return by_length, by_order


def evaluate_similarity(directory: str, data: Path, tokens: int) -> Any:
    """Compare the embeddings of a BERT with other, untrained encodings to the original ones."""
    schemes = {"stock": None, "table + t5": ["learned", "t5"], "rope": "rope", "alibi": "alibi"}
    models = {
        name: AutoModel.from_pretrained(directory, **({} if scheme is None else {"position_scheme": scheme})).eval()
        for name, scheme in schemes.items()
    }
    settings: dict[str, Any] = {"tokenizer": directory, "max_tokens": tokens, "progress": False}
    return hf_posenc.evaluate(models, data, lengths=[32, 128, 512, 1024], metrics=["similarity"], **settings)
