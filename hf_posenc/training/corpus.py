"""Rows of token ids from documents, for one tokenizer, length and objective."""

from __future__ import annotations

import dataclasses
from typing import Any

from .objective import Objective
from .rows import Columns, packed, packed_pieces, single
from .texts import IDS, text_column

DOCUMENTS_AT_A_TIME = 1000


@dataclasses.dataclass(frozen=True)
class Corpus:
    """How documents become rows."""

    tokenizer: Any
    length: int
    objective: Objective
    packing: bool = True
    column: str | None = None
    label_column: str = "label"

    def rows(self, documents: Any) -> Any:
        """A dataset of rows from one of documents, streamed or not. Raises where it would be empty."""
        columns = list(documents.column_names or next(iter(documents)))
        column = text_column([name for name in columns if name != self.label_column], self.column)
        if self.objective is Objective.CLASSIFICATION:
            if self.label_column not in columns:
                raise ValueError(f"to classify takes a column of labels, and {self.label_column!r} is not in {columns}")
            return documents.map(self._classified(column), batched=True, remove_columns=columns)
        rows = documents.map(
            self._cut(column), batched=True, batch_size=DOCUMENTS_AT_A_TIME, remove_columns=columns, **_said(documents)
        )
        if hasattr(rows, "__len__") and not len(rows):
            raise ValueError(
                f"the text does not fill one row of {self.length} tokens: take more of it, or a smaller train length"
            )
        return rows

    def _cut(self, column: str) -> Any:
        def cut(batch: dict[str, list[Any]]) -> Columns:
            if self.objective is Objective.CAUSAL and self.packing:
                return packed(self._documents(batch[column], column), self.length)
            found = batch[column] if column == IDS else self._pieces(batch[column])
            return packed_pieces(found, self.length, self.tokenizer.pad_token_id) if self.packing else single(found)

        return cut

    def _documents(self, texts: list[Any], column: str) -> list[list[int]]:
        """Whole documents, with the token that ends a text behind each."""
        if column == IDS:
            return texts
        end = self.tokenizer.eos_token_id
        found = self.tokenizer([text for text in texts if text], verbose=False, return_attention_mask=False)[IDS]
        return [ids if end is None or ids[-1:] == [end] else [*ids, end] for ids in found]

    def _pieces(self, texts: list[str]) -> list[list[int]]:
        """Documents cut to the length of a row, with the special tokens that an encoder expects around each piece."""
        cut = self.tokenizer(
            [text for text in texts if text],
            truncation=True,
            max_length=self.length,
            return_overflowing_tokens=True,
            return_attention_mask=False,
        )
        return list(cut[IDS])

    def _classified(self, column: str) -> Any:
        def classified(batch: dict[str, list[Any]]) -> Columns:
            rows = dict(self.tokenizer(batch[column], truncation=True, max_length=self.length))
            return {**rows, "labels": batch[self.label_column]}

        return classified


def _said(documents: Any) -> dict[str, str]:
    """A stream shows no progress, and takes no words for it."""
    return {"desc": "Cutting text into rows"} if hasattr(documents, "__len__") else {}
