"""How far a changed model has moved from the one it was made of, on some text: before any training, or after it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForMaskedLM, AutoTokenizer

LONGEST, ROWS, AT_A_TIME = 512, 64, 8
"""Tokens of a row, rows of a measurement and of a batch."""


@dataclasses.dataclass(frozen=True)
class Drift:
    """Two models on the same tokens."""

    tokens: int
    cosine: float
    """Of the last hidden states, averaged over tokens."""
    divergence: float | None = None
    """Kullback-Leibler, from the first model's predictions to the second's, in nats a token; None without a head."""
    perplexity_before: float | None = None
    """None for models that are not causal."""
    perplexity_after: float | None = None

    def __str__(self) -> str:
        parts = [f"{self.tokens:,} tokens: cosine of hidden states {self.cosine:.4f}"]
        if self.divergence is not None:
            parts.append(f"KL divergence {self.divergence:.4f} nats a token")
        if self.perplexity_before is not None and self.perplexity_after is not None:
            ratio = self.perplexity_after / self.perplexity_before
            parts.append(f"perplexity {self.perplexity_before:.4g} to {self.perplexity_after:.4g} ({ratio:.2f} times)")
        return ", ".join(parts)


@torch.no_grad()
def measure_drift(before: nn.Module, after: nn.Module, batches: Iterable[torch.Tensor], causal: bool) -> Drift:
    """Compare two models on batches of token ids, (B, N), without padding."""
    tokens, predicted = 0, 0
    cosine = divergence = loss_before = loss_after = 0.0
    has_head = False
    for ids in batches:
        first, second = (model(ids, output_hidden_states=True) for model in (before, after))
        similar = nn.functional.cosine_similarity(first.hidden_states[-1], second.hidden_states[-1], dim=-1)
        tokens, cosine = tokens + ids.numel(), cosine + similar.double().sum().item()
        if has_head := hasattr(first, "logits"):
            known, changed = (output.logits.float().log_softmax(-1) for output in (first, second))
            divergence += (known.exp() * (known - changed)).sum().item()
        if has_head and causal:
            predicted += ids[:, 1:].numel()
            loss_before += _loss(known, ids)
            loss_after += _loss(changed, ids)
    if not tokens:
        raise ValueError("there are no tokens to measure on")
    return Drift(
        tokens=tokens,
        cosine=cosine / tokens,
        divergence=divergence / tokens if has_head else None,
        perplexity_before=_perplexity(loss_before / predicted) if predicted else None,
        perplexity_after=_perplexity(loss_after / predicted) if predicted else None,
    )


def _loss(log_probabilities: torch.Tensor, ids: torch.Tensor) -> float:
    return -log_probabilities[:, :-1].gather(-1, ids[:, 1:, None]).sum().item()


def _perplexity(loss: float) -> float:
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf


def measure_checkpoint_drift(before: Path, after: Path, text: Path) -> Drift:
    """Load two checkpoints, cut a text file into rows of their length, and compare them on the first of these."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(before, trust_remote_code=False)
        content = text.read_text(encoding="utf-8")
    except Exception as error:  # tokenizers raise whatever they meet where their files are not there
        raise ValueError(f"the drift cannot be measured: {error}") from error
    ids = torch.tensor(tokenizer(content[: 16 * LONGEST * ROWS], verbose=False)["input_ids"], dtype=torch.long)
    if not len(ids):
        raise ValueError(f"the drift cannot be measured: {text} has no tokens")
    try:
        stock, variant = (_load(path) for path in (before, after))
    except OSError as error:
        raise ValueError(f"the drift cannot be measured: {error}") from error
    config = stock.config
    if ids.max() >= config.vocab_size:
        raise ValueError(
            f"the drift cannot be measured: the tokenizer knows more tokens ({ids.max()} is one) than the "
            f"{config.vocab_size:,} that the model has embeddings of"
        )
    length = min(config.max_position_embeddings, LONGEST, len(ids))
    rows = ids[: len(ids) // length * length].view(-1, length)[:ROWS]
    causal = config.model_type != "bert" or config.is_decoder
    return measure_drift(stock, variant, rows.split(AT_A_TIME), causal)


def _load(path: Path) -> Any:
    """The model with the head it was saved with, where that is one that predicts tokens; else without a head."""
    names = AutoConfig.from_pretrained(path, trust_remote_code=False).architectures or []
    auto: Any = AutoModel
    if any(name.endswith("ForMaskedLM") for name in names):
        auto = AutoModelForMaskedLM
    elif any(name.endswith(("ForCausalLM", "LMHeadModel")) for name in names):
        auto = AutoModelForCausalLM
    return auto.from_pretrained(path, use_safetensors=True, trust_remote_code=False).eval()
