"""Read text for training and evaluation: local files, datasets saved to disk, datasets on the Hub."""

from __future__ import annotations

import glob
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from .checkpoints import is_out_of_space
from .errors import PosEncError, install_command
from .validation import truncate_repr

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset

BUILDERS = {
    **dict.fromkeys((".txt", ".text", ".md"), "text"),
    **dict.fromkeys((".json", ".jsonl"), "json"),
    ".csv": "csv",
    ".parquet": "parquet",
}
"""File extension -> builder in the `datasets` library."""
DESCRIPTIONS = ("readme", "license", "changelog")
"""Markdown files that come with a dataset and are not part of it."""
INPUT_IDS, ATTENTION_MASK, POSITION_IDS, TEXT = "input_ids", "attention_mask", "position_ids", "text"
"""Columns of a dataset, and inputs of a model."""


def load_text_dataset(source: str, split: str = "train", streaming: bool = False) -> Dataset | IterableDataset:
    """Load a dataset from a file, a directory, a glob pattern, `Dataset.save_to_disk` output or the Hub.

    A text file becomes one document; other formats have one per row. Plain files have no splits.
    """
    try:
        from datasets import DatasetDict, load_dataset, load_from_disk
    except ImportError:
        raise PosEncError(
            f"Reading data requires the datasets library: {install_command('train')}, or pass a list of texts"
        ) from None
    path = Path(source).expanduser()
    if (path / "dataset_dict.json").is_file() or (path / "state.json").is_file():
        dataset = load_from_disk(str(path))
        if isinstance(dataset, DatasetDict):
            if split not in dataset:
                raise PosEncError(f"{path} has no split {split!r}; expected one of {sorted(dataset)}")
            dataset = dataset[split]
        return dataset.to_iterable_dataset() if streaming else dataset
    if path.is_dir():
        files = [str(file) for file in sorted(path.rglob("*")) if _is_data(file)]
    else:
        matches = [str(path)] if path.is_file() else sorted(glob.glob(str(path), recursive=True))
        files = [file for file in matches if Path(file).is_file()]
    if files:
        builders = {BUILDERS.get(Path(file).suffix.lower()) for file in files}
        builder = builders.pop()
        if builders or builder is None:
            raise PosEncError(f"{source} must contain files of a single type; supported extensions: {sorted(BUILDERS)}")
        options = {"sample_by": "document"} if builder == "text" else {}
        with translate_data_errors(source):
            return load_dataset(builder, data_files=files, split="train", streaming=streaming, **options)
    try:
        return load_dataset(source, split=split, streaming=streaming)
    except (OSError, ValueError) as error:
        raise PosEncError(
            f"No data found at {source}: it is not a file, directory or glob pattern, and could not be loaded from the "
            f"Hub: {error}"
        ) from error


def _is_data(file: Path) -> bool:
    """Whether a file in a directory holds data, rather than describing it as a README.md does."""
    is_description = file.suffix.lower() == ".md" and file.stem.lower() in DESCRIPTIONS
    return file.suffix.lower() in BUILDERS and not is_description and file.is_file()


@contextmanager
def translate_data_errors(source: str, in_training: bool = False) -> Iterator[None]:
    """Raise errors of the `datasets` library about files that cannot be read as `PosEncError`.

    `in_training`, where a stream is read, other errors may have other causes, and keep their traceback.
    """
    from datasets.exceptions import DatasetsError
    from pyarrow import ArrowException

    reading: tuple[type[Exception], ...] = (DatasetsError, ArrowException)
    if not in_training:
        reading += (ValueError, TypeError, KeyError, OSError)
    try:
        yield
    except PosEncError:
        raise
    except reading as error:
        if is_out_of_space(error):  # of the cache of processed rows
            raise
        cause = error.__cause__ or error
        raise PosEncError(
            f"Cannot read the data in {source}: {truncate_repr(cause, str)}. Expected UTF-8 text, or JSONL, CSV or "
            "parquet files whose rows all have the same columns"
        ) from error
    except StopIteration:  # raised for an empty JSON file
        raise PosEncError(f"{source} is empty: pass data with at least one row") from None


def check_document(value: object, column: str) -> str | list[int]:
    """Return the text or the token ids of a row. Raises `PosEncError` for anything else."""
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(type(token) is int and token >= 0 for token in value):
        return value
    raise PosEncError(f"Column {column!r} has a row with {truncate_repr(value)}; expected text, or a list of token ids")


def select_text_column(columns: Sequence[str], requested: str | None = None) -> str:
    """Pick the column to read: the requested one, `input_ids`, `text`, or the only column."""
    if requested is not None and requested not in columns:
        raise PosEncError(f"The data has no column {requested!r}; expected one of {sorted(columns)}")
    for name in (requested, INPUT_IDS, TEXT):
        if name is not None and name in columns:
            return name
    if len(columns) == 1:
        return columns[0]
    raise PosEncError(f"Cannot tell which of the columns {sorted(columns)} is the text: set --text-column")
