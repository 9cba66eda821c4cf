"""Measure how far a model's outputs have moved from those of the model it was made from, on a text."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch
from torch.nn import functional

from ..errors import PosEncError
from ..patches import ARCHITECTURES, find_auto_class, max_positions
from .loading import load_model, load_tokenizer
from .source import read_config

MAX_SEQUENCE_LENGTH, MAX_SEQUENCES, BATCH_SIZE = 512, 64, 8
MAX_CHARACTERS = 16 * MAX_SEQUENCE_LENGTH * MAX_SEQUENCES
"""How much text is tokenized at most to fill the sequences."""


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
def measure_drift(before: Path, after: Path, text_file: Path) -> Drift:
    """Load two checkpoints and compare them on the beginning of a text file."""
    config = read_config(before)
    sequences = read_sequences(before, text_file, config.vocab_size, max_positions(config), "measure drift")
    causal = ARCHITECTURES[config.model_type].is_causal(config)
    auto_class = find_auto_class(config.architectures or []) or "AutoModel"
    models = [load_model(directory, auto_class)[0] for directory in (before, after)]
    cosine = divergence = 0.0
    losses, num_predicted = torch.zeros(2, dtype=torch.double), 0
    has_head = False
    for input_ids in sequences.split(BATCH_SIZE):
        outputs, new_outputs = (model(input_ids, output_hidden_states=True) for model in models)
        similarity = functional.cosine_similarity(outputs.hidden_states[-1], new_outputs.hidden_states[-1], dim=-1)
        cosine += similarity.double().sum().item()
        if has_head := hasattr(outputs, "logits"):
            log_probs, new_log_probs = (out.logits.float().log_softmax(-1) for out in (outputs, new_outputs))
            divergence += (log_probs.exp() * (log_probs - new_log_probs)).sum().item()
        if has_head and causal:
            num_predicted += input_ids[:, 1:].numel()
            for index, predicted in enumerate((log_probs, new_log_probs)):
                losses[index] -= predicted[:, :-1].gather(-1, input_ids[:, 1:, None]).sum()
    perplexities = (losses / num_predicted).exp().tolist() if num_predicted else (None, None)
    num_tokens = sequences.numel()
    return Drift(num_tokens, cosine / num_tokens, divergence / num_tokens if has_head else None, *perplexities)


def read_sequences(checkpoint: Path, text_file: Path, vocab_size: int, max_length: int, purpose: str) -> torch.Tensor:
    """Token ids of equally long sequences from the beginning of a text file; `purpose` is for error messages."""
    try:
        tokenizer = load_tokenizer(checkpoint)
        text = text_file.read_text(encoding="utf-8")[:MAX_CHARACTERS]
    except (OSError, ValueError) as error:
        raise PosEncError(f"Cannot {purpose}: {error}") from error
    if tokenizer is None:
        raise PosEncError(f"Cannot {purpose}: {checkpoint} has no tokenizer files")
    input_ids = torch.tensor(tokenizer(text, verbose=False)["input_ids"], dtype=torch.long)
    if not len(input_ids):
        raise PosEncError(f"Cannot {purpose}: {text_file} has no tokens")
    if input_ids.max() >= vocab_size:
        raise PosEncError(
            f"Cannot {purpose}: the tokenizer produced token {input_ids.max()}, but the model's vocabulary has "
            f"{vocab_size:,} tokens"
        )
    length = min(max_length, MAX_SEQUENCE_LENGTH, len(input_ids))
    return input_ids[: len(input_ids) // length * length].view(-1, length)[:MAX_SEQUENCES]
