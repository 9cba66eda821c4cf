"""Measure how far a model's outputs have moved from those of the model it was made from, on a text."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoTokenizer,
    PreTrainedModel,
)

from ..errors import PosEncError
from ..patches import ARCHITECTURES

MAX_SEQUENCE_LENGTH, MAX_SEQUENCES, BATCH_SIZE = 512, 64, 8
CHARACTERS_PER_TOKEN = 16
"""Upper bound for how much text is tokenized to fill the sequences."""


@dataclasses.dataclass(frozen=True)
class Drift:
    """The difference between two models on the same tokens."""

    num_tokens: int
    hidden_state_cosine: float
    """Cosine similarity of the last hidden states, averaged over tokens."""
    kl_divergence: float | None = None
    """From the first model's predictions to the second's, in nats per token; None without a language-model head."""
    perplexity_before: float | None = None
    """None for models that are not causal."""
    perplexity_after: float | None = None

    def __str__(self) -> str:
        text = f"{self.num_tokens:,} tokens: cosine of hidden states {self.hidden_state_cosine:.4f}"
        if self.kl_divergence is not None:
            text += f", KL divergence {self.kl_divergence:.4f} nats per token"
        if self.perplexity_before is not None and self.perplexity_after is not None:
            ratio = self.perplexity_after / self.perplexity_before
            text += f", perplexity {self.perplexity_before:.4g} to {self.perplexity_after:.4g} ({ratio:.2f}x)"
        return text


@torch.no_grad()
def measure_drift(before: nn.Module, after: nn.Module, batches: Iterable[torch.Tensor], causal: bool) -> Drift:
    """Compare two models on batches of (batch, length) token ids; perplexity is measured if they are causal."""
    num_tokens, num_predicted = 0, 0
    cosine = divergence = loss_before = loss_after = 0.0
    has_head = False
    for input_ids in batches:
        outputs, new_outputs = (model(input_ids, output_hidden_states=True) for model in (before, after))
        similarity = nn.functional.cosine_similarity(outputs.hidden_states[-1], new_outputs.hidden_states[-1], dim=-1)
        num_tokens, cosine = num_tokens + input_ids.numel(), cosine + similarity.double().sum().item()
        if has_head := hasattr(outputs, "logits"):
            log_probs, new_log_probs = (out.logits.float().log_softmax(-1) for out in (outputs, new_outputs))
            divergence += (log_probs.exp() * (log_probs - new_log_probs)).sum().item()
        if has_head and causal:
            num_predicted += input_ids[:, 1:].numel()
            loss_before += _next_token_loss(log_probs, input_ids)
            loss_after += _next_token_loss(new_log_probs, input_ids)
    if not num_tokens:
        raise PosEncError("Cannot measure drift: there are no tokens")
    return Drift(
        num_tokens=num_tokens,
        hidden_state_cosine=cosine / num_tokens,
        kl_divergence=divergence / num_tokens if has_head else None,
        perplexity_before=_perplexity(loss_before / num_predicted) if num_predicted else None,
        perplexity_after=_perplexity(loss_after / num_predicted) if num_predicted else None,
    )


def _next_token_loss(log_probs: torch.Tensor, input_ids: torch.Tensor) -> float:
    return -log_probs[:, :-1].gather(-1, input_ids[:, 1:, None]).sum().item()


def _perplexity(loss: float) -> float:
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf


def measure_checkpoint_drift(before: Path, after: Path, text_file: Path) -> Drift:
    """Load two checkpoints and compare them on the beginning of a text file."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(before, trust_remote_code=False)
        text = text_file.read_text(encoding="utf-8")
    except Exception as error:  # tokenizers raise many kinds of errors if their files are missing
        raise PosEncError(f"Cannot measure drift: {error}") from error
    text = text[: CHARACTERS_PER_TOKEN * MAX_SEQUENCE_LENGTH * MAX_SEQUENCES]
    input_ids = torch.tensor(tokenizer(text, verbose=False)["input_ids"], dtype=torch.long)
    if not len(input_ids):
        raise PosEncError(f"Cannot measure drift: {text_file} has no tokens")
    try:
        stock, variant = _load_model(before), _load_model(after)
    except OSError as error:
        raise PosEncError(f"Cannot measure drift: {error}") from error
    config = stock.config
    if input_ids.max() >= config.vocab_size:
        raise PosEncError(
            f"Cannot measure drift: the tokenizer produced token {input_ids.max()}, but the model's vocabulary has "
            f"{config.vocab_size:,} tokens"
        )
    length = min(config.max_position_embeddings, MAX_SEQUENCE_LENGTH, len(input_ids))
    sequences = input_ids[: len(input_ids) // length * length].view(-1, length)[:MAX_SEQUENCES]
    causal = ARCHITECTURES[config.model_type].is_causal(config)
    return measure_drift(stock, variant, sequences.split(BATCH_SIZE), causal)


def _load_model(path: Path) -> PreTrainedModel:
    """Load with the language-model head that the checkpoint was saved with, or without a head."""
    architectures = AutoConfig.from_pretrained(path, trust_remote_code=False).architectures or []
    auto_class: type = AutoModel
    if any(name.endswith("ForMaskedLM") for name in architectures):
        auto_class = AutoModelForMaskedLM
    elif any(name.endswith(("ForCausalLM", "LMHeadModel")) for name in architectures):
        auto_class = AutoModelForCausalLM
    return auto_class.from_pretrained(path, use_safetensors=True, trust_remote_code=False).eval()  # type: ignore[attr-defined]
