"""The classes that a model tells apart: by the labels of the data, or by the head that a checkpoint has already."""

from __future__ import annotations

import dataclasses
from typing import Any

MOST_CLASSES = 10_000
"""Labels that are more are no classes: a column of numbers that mean something else."""


@dataclasses.dataclass(frozen=True)
class Classes:
    """By their numbers. A label is such a number or such a name."""

    names: tuple[str, ...]

    def number(self, label: Any) -> int:
        if isinstance(label, str) and label in self.names:
            return self.names.index(label)
        if isinstance(label, (bool, int)) and 0 <= label < len(self.names):
            return int(label)
        some = ", ".join(map(repr, self.names[:8])) + (" and others" if len(self.names) > 8 else "")
        raise ValueError(
            f"{label!r} is none of the {len(self.names)} classes ({some}, or their numbers from 0): correct the data"
        )

    @property
    def fields(self) -> dict[str, Any]:
        """Of a model's config."""
        return {"id2label": dict(enumerate(self.names)), "label2id": {name: n for n, name in enumerate(self.names)}}


def classes_of(config: Any, has_head: bool, documents: Any, column: str) -> Classes:
    """Those of the checkpoint's head where it has one; else those that are in the data."""
    columns = list(documents.column_names or next(iter(documents)))
    if column not in columns:
        raise ValueError(
            f"to classify takes a column of labels, and {column!r} is not in {columns}: name one with --label-column"
        )
    if has_head:
        return Classes(tuple(config.id2label[number] for number in range(config.num_labels)))
    names = getattr((documents.features or {}).get(column), "names", None)
    if names:
        return Classes(tuple(names))
    if not hasattr(documents, "__len__"):
        raise ValueError(
            "how many classes a stream has is not known before its end: leave out --streaming, or begin with a "
            "checkpoint that has a head for them"
        )
    return _told_apart(documents.unique(column), column)


def _told_apart(labels: list[Any], column: str) -> Classes:
    if all(isinstance(label, str) for label in labels) and 1 < len(labels) <= MOST_CLASSES:
        return Classes(tuple(sorted(labels)))
    if all(isinstance(label, (bool, int)) and 0 <= label < MOST_CLASSES for label in labels) and any(labels):
        return Classes(tuple(f"LABEL_{number}" for number in range(int(max(labels)) + 1)))
    raise ValueError(
        f"to classify takes labels that are names, or whole numbers from 0, of two classes or more; {column!r} has "
        f"{labels[:8]!r}"
    )


def accuracy(found: Any) -> dict[str, float]:
    """For a Trainer: the share of rows whose class is the one that was predicted."""
    predicted = found.predictions[0] if isinstance(found.predictions, tuple) else found.predictions
    return {"accuracy": float((predicted.argmax(-1) == found.label_ids).mean())}
