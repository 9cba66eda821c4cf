"""Rows of token ids from a text file, for what is measured on a text."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoTokenizer

CHARACTERS_A_TOKEN = 16
"""No more of the text is read than this for each token asked for."""


def words_of(tokenizer: str | Path, tokens: Sequence[int]) -> tuple[str, ...] | None:
    """The tokens of a checkpoint in writing; None where there is no tokenizer beside it."""
    try:
        reader = AutoTokenizer.from_pretrained(tokenizer)
        return tuple(reader.decode([token]).strip() or f"token {token}" for token in tokens)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def token_rows(tokenizer: str | Path, text: Path, length: int, rows: int) -> torch.Tensor:
    """(B, N): the first rows of a text file, in the tokens of a checkpoint; one shorter row if there is no more."""
    try:
        reader = AutoTokenizer.from_pretrained(tokenizer)
        with text.open(encoding="utf-8") as file:
            content = file.read(CHARACTERS_A_TOKEN * length * rows)
    except (OSError, ValueError) as error:
        raise ValueError(f"the text cannot be read: {error}") from error
    ids = reader(content, return_tensors="pt", verbose=False, add_special_tokens=False)["input_ids"][0].long()
    length = min(length, len(ids))
    if length < 2:
        raise ValueError(f"{text} has fewer than two tokens")
    return ids[: len(ids) // length * length].view(-1, length)[:rows]
