"""The evaluation text: token ids, and windows of one length.

Shapes: B windows in a batch, N tokens in a window.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from ..errors import PosEncError
from ..text_data import INPUT_IDS, check_document, load_text_dataset, select_text_column, translate_data_errors
from .results import EvaluationStopped

TextData = str | Path | torch.Tensor | Sequence[str] | Sequence[Sequence[int]]
Document = str | torch.Tensor | Sequence[int]
MAX_CHARACTERS_PER_TOKEN = 64
"""Bounds how much of a long document is tokenized when only its first tokens are needed."""
SAMPLE_TEXTS = ("a", "0", "A", ".", "the 1", "\u4e00")
"""Any tokenizer should keep at least one of these."""


def load_token_ids(
    data: TextData,
    tokenizer: PreTrainedTokenizerBase | None,
    max_tokens: int,
    split: str = "test",
    text_column: str | None = None,
) -> torch.Tensor:
    """The first `max_tokens` tokens of the data: documents concatenated, each followed by an end-of-text token."""
    chunks: list[torch.Tensor] = []
    remaining = max_tokens
    for document in _iter_documents(data, split, text_column):
        if isinstance(document, str):
            if tokenizer is None:
                raise PosEncError("Text needs a tokenizer, and the model has none: pass tokenizer= or token ids")
            text = document[: MAX_CHARACTERS_PER_TOKEN * remaining]
            document = tokenizer(text, add_special_tokens=False, verbose=False)[INPUT_IDS]
            end_id = tokenizer.sep_token_id if tokenizer.eos_token_id is None else tokenizer.eos_token_id
            document += [end_id] if document and end_id is not None else []
        chunks.append(torch.as_tensor(document, dtype=torch.long)[:remaining])
        remaining -= len(chunks[-1])
        if not remaining:
            break
    if remaining == max_tokens:
        raise PosEncError("The evaluation data is empty: pass at least one non-empty text")
    return torch.cat(chunks)


def _iter_documents(data: TextData, split: str, text_column: str | None) -> Iterator[Document]:
    if isinstance(data, (str, Path)):
        with translate_data_errors(str(data)):
            rows: Iterable[dict[str, Document]] = load_text_dataset(str(data), split, streaming=True)
            first_row = next(iter(rows), None)
            if first_row is not None:
                column = select_text_column(list(first_row), text_column)
                for row in rows:
                    yield check_document(row.get(column), column)
    elif isinstance(data, torch.Tensor):
        yield from data if data.dim() == 2 else data[None]
    else:
        yield from data


def text_hash(token_ids: torch.Tensor) -> str:
    """A short hash that tells whether two token sequences are the same."""
    return hashlib.sha256(token_ids.numpy().tobytes()).hexdigest()[:16]


@dataclasses.dataclass(frozen=True)
class SpecialTokens:
    """Token ids before and after the text of every window."""

    prefix: tuple[int, ...] = ()
    suffix: tuple[int, ...] = ()

    @classmethod
    def from_tokenizer(cls, tokenizer: PreTrainedTokenizerBase | None, causal: bool) -> SpecialTokens:
        """What the tokenizer adds around a text. A causal model gains nothing from a suffix, so it gets none."""
        if tokenizer is None:
            return cls()
        encoded = ((text, tokenizer(text, add_special_tokens=False)[INPUT_IDS]) for text in SAMPLE_TEXTS)
        sample, ids = next(((text, ids) for text, ids in encoded if ids), ("", []))
        full_ids = tokenizer(sample)[INPUT_IDS] if ids else []
        for start in range(len(full_ids) - len(ids) + 1):
            if full_ids[start : start + len(ids)] == ids:
                suffix = () if causal else tuple(full_ids[start + len(ids) :])
                return cls(tuple(full_ids[:start]), suffix)
        return cls()

    def __len__(self) -> int:
        return len(self.prefix) + len(self.suffix)


@dataclasses.dataclass(frozen=True)
class Windows:
    """Windows of `length` tokens: adjacent, or sliding with a stride. An incomplete window at the end is dropped."""

    token_ids: torch.Tensor
    special_tokens: SpecialTokens
    length: int
    stride: int | None = None

    def __post_init__(self) -> None:
        if self.text_length < 1:
            raise PosEncError(
                f"A window of {self.length} tokens has no room for text besides {len(self.special_tokens)} special "
                "tokens: use a longer window"
            )
        if len(self.token_ids) < self.text_length:
            raise EvaluationStopped(
                f"The text has {len(self.token_ids):,} tokens, too few for a window of {self.length:,}: use more text "
                "or a higher max_tokens"
            )

    @property
    def text_length(self) -> int:
        return self.length - len(self.special_tokens)

    @property
    def step(self) -> int:
        """Tokens between the starts of two windows."""
        return min(self.stride or self.text_length, self.text_length)

    def __len__(self) -> int:
        return (len(self.token_ids) - self.text_length) // self.step + 1

    def segments(self) -> torch.Tensor:
        """Index of each window's text segment: overlapping windows are not independent and share one."""
        return torch.arange(len(self)) * self.step // self.text_length

    def input_ids(self, indices: Sequence[int]) -> torch.Tensor:
        """Token ids with special tokens, (B, N)."""
        prefix, suffix = (torch.tensor(ids) for ids in (self.special_tokens.prefix, self.special_tokens.suffix))
        texts = [self.token_ids[index * self.step :][: self.text_length] for index in indices]
        return torch.stack([torch.cat([prefix.long(), text, suffix.long()]) for text in texts])

    def text_mask(self) -> torch.Tensor:
        """True at text positions, False at special tokens, (N,)."""
        mask_N = torch.zeros(self.length, dtype=torch.bool)
        mask_N[len(self.special_tokens.prefix) : self.length - len(self.special_tokens.suffix)] = True
        return mask_N

    def new_tokens(self, indices: Sequence[int]) -> torch.Tensor:
        """True at tokens that a causal model scores, (B, N): not in an earlier window, and not the very first token."""
        overlap_B = (torch.tensor(indices) > 0) * (self.text_length - self.step)
        first_new_B = (len(self.special_tokens.prefix) + overlap_B).clamp(min=1)
        return torch.arange(self.length) >= first_new_B[:, None]
