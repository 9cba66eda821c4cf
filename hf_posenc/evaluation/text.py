"""The text to measure on, as one stream of token ids."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from ..text_data import INPUT_IDS as IDS
from ..text_data import load_text_dataset as read
from ..text_data import select_text_column as text_column

Data = str | Path | torch.Tensor | Sequence[str] | Sequence[Sequence[int]]
CHARACTERS_A_TOKEN = 64
"""More of a document than this is not tokenised where only so many tokens are wanted."""


def stream_of(data: Data, tokenizer: Any, wanted: int, split: str, column: str | None) -> torch.Tensor:
    """The first `wanted` tokens of a file, a dataset, texts or ids: documents one behind the other, each with the
    token that ends a text."""
    pieces: list[torch.Tensor] = []
    room = wanted
    for document in documents_of(data, split, column):
        ids = _ids_of(document, tokenizer, room)[:room]
        pieces.append(ids)
        room -= len(ids)
        if not room:
            break
    if room == wanted:
        raise ValueError("there is no text to measure on: the data is empty")
    return torch.cat(pieces)


def documents_of(data: Data, split: str, column: str | None) -> Iterator[Any]:
    if isinstance(data, (str, Path)):
        documents = _read(str(data), split)
        try:
            first = next(iter(documents), None)
        except UnicodeDecodeError as error:
            raise ValueError(f"{data} is no text in UTF-8: {error}") from error
        if first is None:
            return
        name = text_column(list(first), column)
        yield from (row[name] for row in documents)
    elif isinstance(data, torch.Tensor):
        yield from (data if data.dim() == 2 else data[None])
    else:
        yield from data


def _read(source: str, split: str) -> Iterable[dict[str, Any]]:
    try:
        return read(source, split, streaming=True)
    except ImportError:
        raise ValueError("reading data takes datasets: pip install hf_posenc[train], or pass a list of texts") from None


def _ids_of(document: Any, tokenizer: Any, room: int) -> torch.Tensor:
    if not isinstance(document, str):
        return torch.as_tensor(document, dtype=torch.long)
    if tokenizer is None:
        raise ValueError("text takes a tokenizer, and there is none beside the model: pass tokenizer=, or token ids")
    text = document[: CHARACTERS_A_TOKEN * room]
    ids = tokenizer(text, add_special_tokens=False, verbose=False)[IDS]
    end = tokenizer.eos_token_id if tokenizer.eos_token_id is not None else tokenizer.sep_token_id
    return torch.tensor(ids if end is None or not ids else [*ids, end], dtype=torch.long)


def digest(stream: torch.Tensor) -> str:
    """Enough to notice that a text is another one."""
    return hashlib.sha256(stream.numpy().tobytes()).hexdigest()[:16]
