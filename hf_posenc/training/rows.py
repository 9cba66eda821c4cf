"""Documents as rows of token ids, for a model to be trained on.

Packed: documents stand one behind the other, positions begin anew with each, and none sees another. A document that
does not fit goes on in the next row, as one of its own.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

IGNORED = -100
"""The label of what is not to be predicted."""
Columns = dict[str, list[Any]]


def packed(documents: list[list[int]], length: int) -> Columns:
    """Full rows for a causal model: ids, positions, and labels without the first token of each document.

    What is left of the last row is dropped; see `left_over`.
    """
    sizes = np.array([len(document) for document in documents], dtype=np.int64)
    num_rows = int(sizes.sum()) // length
    ids = np.fromiter(itertools.chain.from_iterable(documents), dtype=np.int64, count=num_rows * length)
    slots = np.arange(num_rows * length)
    starts = np.repeat(sizes.cumsum() - sizes, sizes)[: num_rows * length]
    positions = slots - np.maximum(starts, slots // length * length)
    labels = np.where(positions == 0, IGNORED, ids)
    columns = {"input_ids": ids, "position_ids": positions, "labels": labels}
    return {name: values.reshape(num_rows, length).tolist() for name, values in columns.items()}


def left_over(documents: list[list[int]], length: int) -> list[list[int]]:
    """What `packed` drops: documents, or what is left of them, to be put before those that come next."""
    used = sum(map(len, documents)) // length * length
    rest = []
    for document in documents:
        if used < len(document):
            rest.append(document[used:])
        used = max(used - len(document), 0)
    return rest


def single(pieces: list[list[int]]) -> Columns:
    """One piece of a document a row, as long as it is: whoever makes the batch pads it."""
    return {"input_ids": pieces, "attention_mask": [[1] * len(piece) for piece in pieces]}


def packed_pieces(pieces: list[list[int]], length: int, pad: int) -> Columns:
    """As many pieces to a row as fit whole; the rest of the row is padding. For encoders, whose pieces have ends."""
    columns: Columns = {"input_ids": [], "attention_mask": [], "position_ids": []}
    for row in _filled(pieces, length):
        ids = list(itertools.chain.from_iterable(row))
        positions = [position for piece in row for position in range(len(piece))]
        rest = length - len(ids)
        columns["input_ids"].append(ids + [pad] * rest)
        columns["attention_mask"].append([1] * len(ids) + [0] * rest)
        columns["position_ids"].append(positions + [0] * rest)
    return columns


def _filled(pieces: list[list[int]], length: int) -> list[list[list[int]]]:
    rows: list[list[list[int]]] = []
    room = 0
    for piece in pieces:
        if len(piece) > room:
            rows.append([])
            room = length
        rows[-1].append(piece)
        room -= len(piece)
    return rows
