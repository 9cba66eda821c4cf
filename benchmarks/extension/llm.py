"""SmolLM2-135M on inputs of up to four times its trained length, without training.

A forward pass of 32,768 tokens takes minutes, so a single one per method and length measures everything: its input is
a context with hidden numbers, then the text whose perplexity is measured, then a question for each number, with its
answer. The scored text is the same at all lengths; only the context before it grows.
"""

from __future__ import annotations

import dataclasses
import math
import os
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import hf_posenc
from hf_posenc.evaluation.results import mean_estimate, perplexity_estimate

from ..recovery.tasks import CheckpointMissing, data_path

SCORED_TOKENS, SEGMENT_TOKENS = 2048, 128
MULTIPLES = {"1x": 1, "2x": 2, "4x": 4}
NAMES = ("Alice", "Boris", "Clara", "David", "Elena", "Frank", "Grace", "Henry", "Irene", "James")
"""A number is hidden for each name, at evenly spaced depths."""
DIGITS, SEED, CONFIDENCE = 5, 0, 0.95
LOGITS_AT_ONCE, TIMED_TOKENS = 256, 512


@dataclasses.dataclass(frozen=True)
class Answer:
    """The tokens of a hidden number in its question, and those of a random number."""

    start: int
    key: list[int]
    distractor: list[int]


@dataclasses.dataclass(frozen=True)
class Prompt:
    """An input: tokens from `scored_start` to `scored_stop` count for perplexity, then come the questions."""

    input_ids: torch.Tensor
    scored_start: int
    scored_stop: int
    answers: list[Answer]


def model_directory(directory: Path | None) -> Path:
    """The directory of SmolLM2-135M.

    Raises:
        CheckpointMissing: If there is none.
    """
    path = directory or Path(os.environ.get("HF_POSENC_SMOLLM2", "smollm2"))
    if not (path / "config.json").is_file():
        raise CheckpointMissing(
            f"{path} has no config.json: pass --llm or set HF_POSENC_SMOLLM2 to a directory with SmolLM2-135M-Instruct"
        )
    return path


def text_file(path: Path | None) -> Path:
    """The text to read: by default, WikiText-2's test split below HF_POSENC_CHECKPOINTS.

    Raises:
        CheckpointMissing: If it does not exist.
    """
    if path is None:
        return data_path("data", "wikitext-2", "test.txt")
    if not path.is_file():
        raise CheckpointMissing(f"{path} not found: pass a text file with --text, such as WikiText-2's test split")
    return path


def build_prompt(tokenizer: Any, text_ids: torch.Tensor, length: int, scored_tokens: int = SCORED_TOKENS) -> Prompt:
    """An input of `length` tokens that ends in the last tokens of the text and the questions."""

    def encode(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    generator = random.Random(SEED)
    numbers = [generator.randrange(10 ** (DIGITS - 1), 10**DIGITS) for _ in range(2 * len(NAMES))]
    keys = [encode(f" {number}") for number in numbers]
    questions, stop = [encode(f" The secret number of {name} is") for name in NAMES], encode(".")
    needles = [[*question, *key, *stop] for question, key in zip(questions, keys, strict=False)]
    room = length - scored_tokens - 2 * sum(map(len, needles))
    if room < len(NAMES) or len(text_ids) < room + scored_tokens:
        raise ValueError(f"{len(text_ids)} tokens of text and {length} tokens of input leave no room for a context")
    context, scored = text_ids[:-scored_tokens][-room:].tolist(), text_ids[-scored_tokens:].tolist()
    pieces: list[int] = []
    for index, needle in enumerate(needles):
        pieces += [*context[room * index // len(NAMES) : room * (index + 1) // len(NAMES)]]
        # Half a piece before the needle and half after it: depths are 5%, 15%, ..., 95%.
        middle = len(pieces) - (room * (index + 1) // len(NAMES) - room * index // len(NAMES)) // 2
        pieces[middle:middle] = needle
    scored_start = len(pieces)
    pieces += scored
    scored_stop, answers = len(pieces), []
    for index in generator.sample(range(len(NAMES)), len(NAMES)):
        start = len(pieces) + len(questions[index])
        answers.append(Answer(start, keys[index], keys[len(NAMES) + index]))
        pieces += needles[index]
    return Prompt(torch.tensor(pieces), scored_start, scored_stop, answers)


@torch.no_grad()
def measure_prompt(model: Any, prompt: Prompt) -> dict[str, Any]:
    """Perplexity of the scored text, and how many of the hidden numbers the model finds, or prefers to random ones."""
    start = time.process_time()
    length = len(prompt.input_ids)
    kept = length - prompt.scored_start + 1
    logits = model(prompt.input_ids[None], use_cache=False, logits_to_keep=kept).logits[0, :-1]
    targets = prompt.input_ids[prompt.scored_start :]
    chunks = zip(logits.split(LOGITS_AT_ONCE), targets.split(LOGITS_AT_ONCE), strict=True)
    losses = torch.cat([nn.functional.cross_entropy(*chunk, reduction="none") for chunk in chunks]).double()
    sums = torch.stack(
        [part.sum() for part in losses[: prompt.scored_stop - prompt.scored_start].split(SEGMENT_TOKENS)]
    )
    counts = torch.full_like(sums, SEGMENT_TOKENS)
    counts[-1] = (prompt.scored_stop - prompt.scored_start) - SEGMENT_TOKENS * (len(sums) - 1)
    estimate = perplexity_estimate(sums, counts, CONFIDENCE)
    found, preferred = [], []
    for answer in prompt.answers:
        first = answer.start - prompt.scored_start
        predicted = logits[first : first + len(answer.key)]
        pairs = enumerate(zip(answer.key, answer.distractor, strict=False))
        fork = next(index for index, (token, other) in pairs if token != other)
        found.append(bool((predicted.argmax(-1) == torch.tensor(answer.key)).all()))
        preferred.append(bool(predicted[fork, answer.key[fork]] > predicted[fork, answer.distractor[fork]]))
    return {
        "perplexity": estimate.value,
        "interval": list(estimate.confidence_interval or ()),
        "segment_losses": [round(value, 4) for value in sums.tolist()],
        "segment_tokens": counts.int().tolist(),
        "found": sum(found) / len(found),
        "passkey": sum(preferred) / len(preferred),
        "cpu_seconds": round(time.process_time() - start),
    }


def relative_loss(result: dict[str, Any], reference: dict[str, Any]) -> tuple[float, list[float]]:
    """Perplexity over that of a reference on the same segments, and its paired confidence interval."""
    losses = torch.tensor(result["segment_losses"]) - torch.tensor(reference["segment_losses"])
    ratio = mean_estimate(losses, torch.tensor(result["segment_tokens"]), CONFIDENCE).map(math.exp)
    return ratio.value, list(ratio.confidence_interval or ())


def forward_operations(config: Any, length: int, attention_cost: float = 1.0) -> float:
    """Floating-point operations of a forward pass without the output layer: weights, and causal attention."""
    width, layers, heads = config.hidden_size, config.num_hidden_layers, config.num_attention_heads
    head_size = getattr(config, "head_dim", None) or width // heads
    attended = heads * head_size
    weights = width * (2 * attended + 2 * config.num_key_value_heads * head_size + 3 * config.intermediate_size)
    return length * layers * (2 * weights + attention_cost * 2 * attended * length)


class LongInputs:
    """SmolLM2-135M, its text, and what is left to measure.

    Args:
        directory: The checkpoint.
        text: A text file.
    """

    def __init__(self, directory: Path, text: Path) -> None:
        self.directory, self.tokenizer = directory, AutoTokenizer.from_pretrained(directory)
        self.trained_length: int = AutoConfig.from_pretrained(directory).max_position_embeddings
        characters = 8 * max(MULTIPLES.values()) * self.trained_length
        ids = self.tokenizer(text.read_text(encoding="utf-8")[:characters], add_special_tokens=False)["input_ids"]
        self.text_ids = torch.tensor(ids[: max(MULTIPLES.values()) * self.trained_length])

    def _load(self) -> Any:
        return AutoModelForCausalLM.from_pretrained(self.directory, dtype=torch.float32).eval()

    @torch.no_grad()
    def estimate(self, rows: list[tuple[str, str]], costs: dict[str, Any]) -> dict[tuple[str, str], float]:
        """CPU minutes of each row, from operations and the measured speed of a short forward pass."""
        model = self._load()
        ids = self.text_ids[None, :TIMED_TOKENS]
        model(ids, logits_to_keep=1)
        start = time.process_time()
        model(ids, logits_to_keep=1)
        speed = forward_operations(model.config, TIMED_TOKENS) / (time.process_time() - start)
        return {
            (multiple, name): forward_operations(
                model.config,
                MULTIPLES[multiple] * self.trained_length,
                costs.get(name, {"ratio": 1.0})["ratio"],
            )
            / speed
            / 60
            for multiple, name in rows
        }

    def measure(self, scheme: Any, multiple: str) -> dict[str, Any]:
        """One method at one length."""
        model = self._load()
        if scheme != "rope":
            hf_posenc.retrofit(model, scheme)
        return measure_prompt(model, build_prompt(self.tokenizer, self.text_ids, self.length(multiple)))

    def length(self, multiple: str) -> int:
        """Tokens of a multiple of the trained length."""
        return MULTIPLES[multiple] * self.trained_length


def missing_rows(results: dict[str, Any], methods: list[str], lengths: list[str]) -> Iterator[tuple[str, str]]:
    """Lengths and methods that are not in the results, the shortest first."""
    for multiple in lengths:
        for name in methods:
            if multiple not in results.get(name, {}):
                yield multiple, name
