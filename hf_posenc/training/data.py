"""From documents to rows of token ids: packing, stages of increasing length, fingerprints, self-generated text.

In packed rows, documents follow each other; positions restart with each and attention does not cross their borders. A
document that does not fit continues in the next row, as a document of its own.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import itertools
import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from tqdm.auto import tqdm
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from ..checkpoints import eval_mode
from ..errors import PosEncError
from ..patches import max_positions
from ..text_data import ATTENTION_MASK, INPUT_IDS, POSITION_IDS, check_document, select_text_column
from ..validation import truncate_repr
from .objectives import Labels, Objective

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset

logger = logging.get_logger(__name__)
IGNORE_INDEX = -100
"""Labels that the loss leaves out."""
SELF_GENERATED_FILE, SELF_EVAL_FILE = "self_generated.safetensors", "self_generated_eval.safetensors"
DOCUMENTS_PER_BATCH, ROWS_PER_READ, FINGERPRINTED_STREAM_ROWS = 1000, 1000, 64
Columns = dict[str, list[Any]]


@dataclasses.dataclass(frozen=True)
class RowBuilder:
    """Turns documents into rows, for one tokenizer, length and objective."""

    tokenizer: PreTrainedTokenizerBase | None
    length: int
    objective: Objective
    packing: bool = True
    text_column: str | None = None
    label_column: str = "label"
    labels: Labels | None = None
    first_position: int = 0
    """What the model's `position_ids` call position 0."""
    vocab_size: int | None = None
    """The model's number of tokens; data with other token ids is refused."""

    def build(self, documents: Dataset | IterableDataset) -> Dataset | IterableDataset:
        """The rows of a dataset of documents, streamed or not."""
        columns = list(documents.column_names or next(iter(documents)))
        column = select_text_column([name for name in columns if name != self.label_column], self.text_column)
        options: dict[str, Any] = {"batched": True, "remove_columns": columns}
        if hasattr(documents, "__len__"):  # streams have no progress bar
            options["desc"] = "Tokenizing"
        if self.objective is Objective.CLASSIFICATION:
            return documents.map(self._classification_rows, fn_kwargs={"column": column}, **options)
        options["batch_size"] = DOCUMENTS_PER_BATCH
        if self.objective is Objective.CAUSAL and self.packing:
            rows = documents.map(self._document_packer(column), with_indices=True, **options)
        else:
            rows = documents.map(self._segment_rows, fn_kwargs={"column": column}, **options)
        if hasattr(rows, "__len__") and not len(rows):
            raise PosEncError(
                f"The text does not fill one row of {self.length} tokens: use more text or a smaller --train-length"
            )
        return rows

    def _document_packer(self, column: str) -> Callable[[Columns, list[int]], Columns]:
        """Packs documents that end with the end-of-text token, and carries what is left over to the next batch."""
        remainder: list[list[int]] = []

        def pack(batch: Columns, indices: list[int]) -> Columns:
            if indices[0] == 0:  # a stream that starts over
                remainder.clear()
            documents = self._documents(batch, column)
            if column != INPUT_IDS and documents:
                assert self.tokenizer is not None
                end = self.tokenizer.eos_token_id
                documents = self.tokenizer(documents, verbose=False, return_attention_mask=False)[INPUT_IDS]
                documents = [ids if end is None or ids[-1:] == [end] else [*ids, end] for ids in documents]
            self._check_ids(documents)
            rows, remainder[:] = pack_documents([*remainder, *documents], self.length)
            return rows

        return pack

    def _documents(self, batch: Columns, column: str) -> list[Any]:
        """The rows of a column that are not empty: texts, or token ids in the column `input_ids`."""
        documents = [document for document in batch[column] if document not in (None, "", [])]
        expected = list if column == INPUT_IDS else str
        for document in documents:
            if not isinstance(check_document(document, column), expected):
                form = f"token ids in the column {INPUT_IDS!r}, and text in others"
                raise PosEncError(f"Column {column!r} has a row with {truncate_repr(document)}; expected {form}")
        return documents

    def _check_ids(self, documents: list[list[int]]) -> None:
        largest = max((max(ids) for ids in documents if ids), default=0)
        if self.vocab_size is not None and largest >= self.vocab_size:
            raise PosEncError(
                f"The text contains token id {largest}, but the model has a vocabulary of {self.vocab_size}: does the "
                "tokenizer belong to the model?"
            )

    def _segment_rows(self, batch: Columns, column: str) -> Columns:
        """Documents cut to the row length, each segment with its own special tokens."""
        texts = self._documents(batch, column)
        if column == INPUT_IDS or not texts:
            segments = [ids[at : at + self.length] for ids in texts for at in range(0, len(ids), self.length)]
        else:
            assert self.tokenizer is not None
            options = {"truncation": True, "max_length": self.length, "return_overflowing_tokens": True}
            segments = list(self.tokenizer(texts, return_attention_mask=False, **options)[INPUT_IDS])
        self._check_ids(segments)
        if self.packing:
            assert self.tokenizer is not None
            return pack_segments(segments, self.length, self.tokenizer.pad_token_id, self.first_position)
        return {INPUT_IDS: segments, ATTENTION_MASK: [[1] * len(segment) for segment in segments]}

    def _classification_rows(self, batch: Columns, column: str) -> Columns:
        assert self.labels is not None
        assert self.tokenizer is not None
        texts = [text or "" for text in batch[column]]
        self._documents({column: texts}, column)
        rows = dict(self.tokenizer(texts, truncation=True, max_length=self.length))
        self._check_ids(rows[INPUT_IDS])
        return {**rows, "labels": [self.labels.class_id(label) for label in batch[self.label_column]]}


def pack_documents(documents: list[list[int]], length: int) -> tuple[Columns, list[list[int]]]:
    """Full rows for a causal model, and what is left over for the next row.

    The rows have ids, positions, and labels without the first token of each document.
    """
    sizes = np.array([len(document) for document in documents], dtype=np.int64)
    starts = sizes.cumsum() - sizes
    used = int(sizes.sum()) // length * length
    remainder = [ids[max(used - start, 0) :] for ids, start in zip(documents, starts, strict=True)]
    ids = np.fromiter(itertools.chain.from_iterable(documents), dtype=np.int64, count=used)
    slots = np.arange(used)
    positions = slots - np.maximum(np.repeat(starts, sizes)[:used], slots // length * length)
    labels = np.where(positions == 0, IGNORE_INDEX, ids)
    columns = {INPUT_IDS: ids, POSITION_IDS: positions, "labels": labels}
    rows = {name: values.reshape(-1, length).tolist() for name, values in columns.items()}
    return rows, [ids for ids in remainder if ids]


def pack_segments(segments: list[list[int]], length: int, pad_token_id: int, first_position: int = 0) -> Columns:
    """Rows for an encoder: as many whole segments as fit, then padding."""
    columns: Columns = {INPUT_IDS: [], ATTENTION_MASK: [], POSITION_IDS: []}
    used = length
    for segment in segments:
        if used + len(segment) > length:
            for rows in columns.values():
                rows.append([])
            used = 0
        columns[INPUT_IDS][-1].extend(segment)
        columns[ATTENTION_MASK][-1].extend([1] * len(segment))
        columns[POSITION_IDS][-1].extend(range(first_position, first_position + len(segment)))
        used += len(segment)
    for name, padding in ((INPUT_IDS, pad_token_id), (ATTENTION_MASK, 0), (POSITION_IDS, first_position)):
        for row in columns[name]:
            row.extend([padding] * (length - len(row)))
    return columns


def concatenate_stages(stages: list[Dataset], sizes: list[int], seed: int) -> Dataset:
    """The rows of all stages in training order; each stage's rows are reshuffled when they run out."""
    from datasets import concatenate_datasets

    generator = np.random.default_rng(seed)
    ordered = []
    for rows, size in zip(stages, sizes, strict=True):
        shuffles = [generator.permutation(len(rows)) for _ in range(math.ceil(size / len(rows)))]
        ordered.append(rows.select(np.concatenate(shuffles)[:size]))
    return concatenate_datasets(ordered)


def limit_tokens(rows: Dataset | IterableDataset, tokens: int | None, length: int) -> Dataset | IterableDataset:
    """The first rows, up to a number of tokens."""
    if tokens is None:
        return rows
    num_rows = max(tokens // length, 1)
    if not hasattr(rows, "__len__"):
        return rows.take(num_rows)
    if len(rows) < num_rows:
        logger.warning(f"The data has {len(rows) * length:,} tokens, fewer than the {tokens:,} of --tokens")
    return rows.select(range(min(num_rows, len(rows))))


def sample_input_ids(rows: Dataset | IterableDataset, count: int, length: int) -> torch.Tensor | None:
    """The first tokens of at most `count` rows, cut to a common length that at least half of the rows reach."""
    candidates = [row[INPUT_IDS][:length] for row in itertools.islice(iter(rows), 2 * count)]
    shortest = sorted(map(len, candidates))[len(candidates) // 2] if candidates else 0
    selected = [row[:shortest] for row in candidates if len(row) >= shortest]
    return torch.tensor(selected[:count]) if shortest > 1 else None


def dataset_fingerprint(rows: Dataset | IterableDataset) -> dict[str, Any]:
    """The number of rows and tokens and a hash, to notice changed data on resuming. Raises PosEncError without rows.

    Of a stream, only the first rows are hashed, and its size is unknown.
    """
    num_rows = len(rows) if hasattr(rows, "__len__") else None
    hashed = rows.take(FINGERPRINTED_STREAM_ROWS) if num_rows is None else rows
    digest, num_tokens = hashlib.sha256(), 0
    for table in hashed.with_format("arrow").iter(ROWS_PER_READ):
        for batch in table.combine_chunks().to_batches():
            digest.update(batch.serialize())
            num_tokens += len(batch[INPUT_IDS].flatten())
    if not num_tokens:  # known of a stream only now
        raise PosEncError("The text does not fill one row: use more text or a smaller --train-length")
    is_stream = num_rows is None
    return {"num_rows": num_rows, "num_tokens": None if is_stream else num_tokens, "sha256": digest.hexdigest()}


@torch.no_grad()
def generate_text(
    model: PreTrainedModel, rows: int, length: int, *, seed: int = 0, batch_size: int = 64, progress: bool = True
) -> torch.Tensor:
    """Sample text from a causal model at temperature 1.

    Args:
        model: The model; its generation settings are ignored.
        rows: Number of rows.
        length: Tokens per row, the first of which is the beginning-of-text token.
        seed: Seed of the sampling.
        batch_size: Rows sampled at a time.
        progress: Show a progress bar.

    Returns:
        Token ids of shape (rows, length).

    Raises:
        PosEncError: If the model has no token to start from or fewer positions than `length`.
    """
    config = model.config
    start = config.bos_token_id if config.bos_token_id is not None else config.eos_token_id
    if isinstance(start, list):
        start = next(iter(start), None)
    if start is None:
        raise PosEncError("The model's config has no bos_token_id to start generating from: pass --data with text")
    num_positions = max_positions(config)
    if length > num_positions:
        raise PosEncError(f"Cannot generate rows of {length} tokens with a model of {num_positions} positions")
    generation_config = model.generation_config
    # Penalties and filters make text easier to read, but distort the distribution that the model has learned.
    model.generation_config = GenerationConfig()
    sampling = {"do_sample": True, "top_k": 0, "top_p": 1.0, "temperature": 1.0, "eos_token_id": None}
    sampling |= {"max_new_tokens": length - 1, "pad_token_id": config.pad_token_id or 0}
    devices = [model.device] if model.device.type != "cpu" else []
    batches = []
    try:
        with torch.random.fork_rng(devices=devices), eval_mode(model):
            torch.manual_seed(seed)
            for done in tqdm(range(0, rows, batch_size), desc="Generating text", disable=not progress):
                prompt = torch.full((min(batch_size, rows - done), 1), start, device=model.device)
                batches.append(model.generate(prompt, **sampling))
    finally:
        model.generation_config = generation_config
    return torch.cat(batches).cpu()


def self_generated_dataset(
    model: PreTrainedModel,
    directory: Path,
    rows: int,
    length: int,
    source: dict[str, str],
    *,
    name: str = SELF_GENERATED_FILE,
    seed: int = 0,
) -> Dataset:
    """Text sampled from a model, kept in a file so that a resumed run reads the same; `source` names the model."""
    from accelerate import PartialState
    from datasets import Dataset

    path = directory / name
    metadata = {**source, "rows": f"{rows} of {length}"}
    existing = None
    with contextlib.suppress(OSError, SafetensorError), safe_open(path, "pt") as file:
        existing = file.metadata()
    if PartialState().is_main_process and existing != metadata:
        directory.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(".new")
        save_file({INPUT_IDS: generate_text(model, rows, length, seed=seed)}, temporary, metadata=metadata)
        temporary.replace(path)
    PartialState().wait_for_everyone()
    return Dataset.from_dict({INPUT_IDS: load_file(path)[INPUT_IDS].tolist()})
