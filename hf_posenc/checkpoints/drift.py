"""Measure how far a model's outputs have moved from those of the model it was made from, on a text."""

from __future__ import annotations

import dataclasses
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional
from tqdm.auto import tqdm
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from ..errors import PosEncError
from ..patches import ARCHITECTURES, find_auto_class, max_positions
from .loading import load_model, load_tokenizer
from .source import read_config

MAX_SEQUENCE_LENGTH, MAX_SEQUENCES, TOKENS_PER_CHUNK = 512, 64, 16
MAX_CHARACTERS = 16 * MAX_SEQUENCE_LENGTH * MAX_SEQUENCES
"""How much text is tokenized at most to fill the sequences."""
LANGUAGE_MODELS = ["AutoModelForCausalLM", "AutoModelForMaskedLM"]
"""Other heads are left out."""
STATES, IGNORED = "hidden_states", -100


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
    """Compare a variant (`after`) with the source that it was converted from, on the beginning of a text file.

    The models are loaded one after the other, the hidden states of the first wait in temporary files, and logits exist
    for a few tokens at a time, so that no more memory is needed than for one forward pass.
    """
    config = read_config(before)
    sequences = read_sequences(before, text_file)
    batches = sequences.split(max(MAX_SEQUENCE_LENGTH // sequences.shape[1], 1))
    with tempfile.TemporaryDirectory(prefix="hf-posenc-") as directory:
        files = [Path(directory) / f"{index}.safetensors" for index in range(len(batches))]
        source, _ = load_model(before)
        for input_ids, path in zip(tqdm(batches, "Running the source", unit="batch"), files, strict=True):
            save_file({STATES: source(input_ids)[0].contiguous()}, path)
        del source
        auto_class = find_auto_class(config.architectures or [], LANGUAGE_MODELS) or "AutoModel"
        variant, _ = load_model(after, auto_class)
        has_head, is_causal = auto_class != "AutoModel", ARCHITECTURES[config.model_type].is_causal(config)
        sums = _Sums()
        for input_ids, path in zip(tqdm(batches, "Running the variant", unit="batch"), files, strict=True):
            states_BNE = load_file(path)[STATES]
            output = variant.base_model(input_ids)
            new_states_BNE = output.last_hidden_state
            similarity_BN = functional.cosine_similarity(states_BNE.float(), new_states_BNE.float(), dim=-1)
            sums.cosine += similarity_BN.double().sum().item()
            if has_head:
                next_ids_BN = functional.pad(input_ids[:, 1:], (0, 1), value=IGNORED) if is_causal else None
                for chunk in _chunks(input_ids.shape[1]):
                    states = torch.cat([states_BNE[:, chunk].to(new_states_BNE), new_states_BNE[:, chunk]])
                    logits, new_logits = _run_head(variant, output, input_ids[:, chunk], states).chunk(2)
                    sums.add_predictions(logits, new_logits, None if next_ids_BN is None else next_ids_BN[:, chunk])
    return sums.drift(sequences.numel(), has_head)


@dataclasses.dataclass
class _Sums:
    """Sums over tokens."""

    cosine: float = 0.0
    divergence: float = 0.0
    losses: torch.Tensor = dataclasses.field(default_factory=lambda: torch.zeros(2, dtype=torch.double))
    num_predicted: int = 0

    def add_predictions(
        self, logits_BNV: torch.Tensor, new_logits_BNV: torch.Tensor, labels_BN: torch.Tensor | None
    ) -> None:
        """Add the predictions of a few tokens; losses only if there are labels."""
        log_probs, new_log_probs = (values.float().log_softmax(-1) for values in (logits_BNV, new_logits_BNV))
        if labels_BN is not None:
            labels = labels_BN.flatten()
            self.num_predicted += int((labels != IGNORED).sum())
            for index, predicted in enumerate((log_probs, new_log_probs)):
                self.losses[index] += functional.nll_loss(
                    predicted.flatten(0, 1), labels, ignore_index=IGNORED, reduction="sum"
                )
        self.divergence += (log_probs.exp() * (log_probs - new_log_probs)).sum().item()

    def drift(self, num_tokens: int, has_head: bool) -> Drift:
        """The means."""
        perplexities = (self.losses / self.num_predicted).exp().tolist() if self.num_predicted else (None, None)
        divergence = self.divergence / num_tokens if has_head else None
        return Drift(num_tokens, self.cosine / num_tokens, divergence, *perplexities)


def _chunks(length: int) -> list[slice]:
    return [slice(start, start + TOKENS_PER_CHUNK) for start in range(0, length, TOKENS_PER_CHUNK)]


def _run_head(
    model: PreTrainedModel, output: ModelOutput, input_ids: torch.Tensor, states_BNE: torch.Tensor
) -> torch.Tensor:
    """The logits of a model's head for given hidden states; everything below the head is skipped.

    Args:
        model: The model.
        output: What its base model returns; changed to hold the given states.
        input_ids: Tokens of the same length as the states; they are not read.
        states_BNE: The last hidden states.
    """
    base = model.base_model
    output.last_hidden_state = states_BNE
    base.forward = lambda *args, **kwargs: output
    try:
        logits: torch.Tensor = model(input_ids).logits
        return logits
    finally:
        del base.forward


def read_sequences(checkpoint: Path, text_file: Path, max_length: int = MAX_SEQUENCE_LENGTH) -> torch.Tensor:
    """Token ids of at most 64 equally long sequences from the beginning of a text file, (number, length).

    They are shorter than `max_length` if the text or the model's positions end before.
    """
    config = read_config(checkpoint)
    try:
        tokenizer = load_tokenizer(checkpoint)
        text = text_file.read_text(encoding="utf-8")[:MAX_CHARACTERS]
    except (OSError, ValueError) as error:
        raise PosEncError(f"Cannot read the text: {error}") from error
    if tokenizer is None:
        raise PosEncError(f"Cannot tokenize {text_file}: {checkpoint} has no tokenizer files")
    input_ids = torch.tensor(tokenizer(text, verbose=False)["input_ids"], dtype=torch.long)
    if not len(input_ids):
        raise PosEncError(f"{text_file} has no tokens")
    if input_ids.max() >= config.vocab_size:
        raise PosEncError(
            f"The tokenizer of {checkpoint} produced token {input_ids.max()}, but the model's vocabulary has "
            f"{config.vocab_size:,} tokens"
        )
    length = min(max_length, max_positions(config), len(input_ids))
    return input_ids[: len(input_ids) // length * length].view(-1, length)[:MAX_SEQUENCES]
