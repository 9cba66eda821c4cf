"""Rows of token ids from documents, for one tokenizer, length and objective."""

from __future__ import annotations

import dataclasses
from typing import Any

from ..text_data import INPUT_IDS as IDS
from ..text_data import select_text_column as text_column
from .classes import Classes
from .objective import Objective
from .rows import Columns, left_over, packed, packed_pieces, single

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
    classes: Classes | None = None
    """Of what is to be classified."""

    def rows(self, documents: Any) -> Any:
        """A dataset of rows from one of documents, streamed or not. Raises where it would be empty."""
        columns = list(documents.column_names or next(iter(documents)))
        column = text_column([name for name in columns if name != self.label_column], self.column)
        if self.objective is Objective.CLASSIFICATION:
            return documents.map(self._classified(column), batched=True, remove_columns=columns)
        rows = documents.map(
            self._packer(column) if self._packs_documents else self._cut(column),
            batched=True,
            with_indices=self._packs_documents,
            batch_size=DOCUMENTS_AT_A_TIME,
            remove_columns=columns,
            **_said(documents),
        )
        if hasattr(rows, "__len__") and not len(rows):
            raise ValueError(
                f"the text does not fill one row of {self.length} tokens: take more of it, or a smaller train length"
            )
        return rows

    @property
    def _packs_documents(self) -> bool:
        return self.objective is Objective.CAUSAL and self.packing

    def _packer(self, column: str) -> Any:
        """Documents come so many at a time, and what is left of some goes before the next: rows are the same however
        many come at a time, and short documents fill long rows."""
        rest: list[list[int]] = []

        def cut(batch: dict[str, list[Any]], places: list[int]) -> Columns:
            if places[0] == 0:  # of a stream that begins again
                rest.clear()
            documents = [*rest, *self._documents(batch[column], column)]
            rest[:] = left_over(documents, self.length)
            return packed(documents, self.length)

        return cut

    def _cut(self, column: str) -> Any:
        def cut(batch: dict[str, list[Any]]) -> Columns:
            found = self._pieces(batch[column], column)
            return packed_pieces(found, self.length, self.tokenizer.pad_token_id) if self.packing else single(found)

        return cut

    def _documents(self, texts: list[Any], column: str) -> list[list[int]]:
        """Whole documents, with the token that ends a text behind each."""
        texts = [text for text in texts if text]
        if column == IDS or not texts:
            return texts
        end = self.tokenizer.eos_token_id
        found = self.tokenizer(texts, verbose=False, return_attention_mask=False)[IDS]
        return [ids if end is None or ids[-1:] == [end] else [*ids, end] for ids in found]

    def _pieces(self, texts: list[Any], column: str) -> list[list[int]]:
        """Documents cut to the length of a row, with the special tokens that an encoder expects around each piece."""
        texts = [text for text in texts if text]
        if column == IDS or not texts:
            return [ids[at : at + self.length] for ids in texts for at in range(0, len(ids), self.length)]
        cut = self.tokenizer(
            texts, truncation=True, max_length=self.length, return_overflowing_tokens=True, return_attention_mask=False
        )
        return list(cut[IDS])

    def _classified(self, column: str) -> Any:
        assert self.classes is not None
        classes = self.classes

        def classified(batch: dict[str, list[Any]]) -> Columns:
            texts = [text or "" for text in batch[column]]
            rows = dict(self.tokenizer(texts, truncation=True, max_length=self.length))
            return {**rows, "labels": [classes.number(label) for label in batch[self.label_column]]}

        return classified


def _said(documents: Any) -> dict[str, str]:
    """A stream shows no progress, and takes no words for it."""
    return {"desc": "Cutting text into rows"} if hasattr(documents, "__len__") else {}
