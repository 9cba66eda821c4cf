"""Read text for training and evaluation: local files, datasets saved to disk, datasets on the Hub."""

from __future__ import annotations

import glob
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from .errors import PosEncError

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset

BUILDERS = {
    ".txt": "text",
    ".text": "text",
    ".md": "text",
    ".json": "json",
    ".jsonl": "json",
    ".csv": "csv",
    ".parquet": "parquet",
}
"""File extension -> builder in the `datasets` library."""
INPUT_IDS, TEXT = "input_ids", "text"


def load_text_dataset(source: str, split: str = "train", streaming: bool = False) -> Dataset | IterableDataset:
    """Load a dataset from a file, a directory, a glob pattern, `Dataset.save_to_disk` output or the Hub.

    Args:
        source: Path, pattern or Hub dataset id. A text file becomes one document; other formats have one per row.
        split: Split to read from saved datasets and from the Hub. Plain files have no splits.
        streaming: Return an `IterableDataset` instead of loading everything.

    Returns:
        The dataset.

    Raises:
        PosEncError: If the source does not exist or cannot be read as a dataset.
    """
    try:
        from datasets import load_dataset
    except ImportError:
        raise PosEncError(
            "Reading data requires the datasets library: pip install hf_posenc[train], or pass a list of texts"
        ) from None

    path = Path(source).expanduser()
    if (path / "dataset_dict.json").is_file() or (path / "state.json").is_file():
        return _load_saved(path, split, streaming)
    files = _find_files(path)
    if files:
        builder = _select_builder(files, source)
        options = {"sample_by": "document"} if builder == "text" else {}
        return load_dataset(builder, data_files=files, split="train", streaming=streaming, **options)
    if _is_local_path(source):
        raise PosEncError(
            f"No data found at {source}: expected a file, a directory, a glob pattern or a Hub dataset id"
        )
    try:
        return load_dataset(source, split=split, streaming=streaming)
    except (OSError, ValueError) as error:
        raise PosEncError(f"{source!r} is not a local file and could not be loaded from the Hub: {error}") from error


def select_text_column(columns: Sequence[str], requested: str | None = None) -> str:
    """Pick the column to read: the requested one, `input_ids`, `text`, or the only column.

    Args:
        columns: Column names of the dataset.
        requested: Column chosen by the user, if any.

    Returns:
        The name of the column.

    Raises:
        PosEncError: If the requested column is missing or the choice is ambiguous.
    """
    if requested is not None:
        if requested not in columns:
            raise PosEncError(f"The data has no column {requested!r}; expected one of {sorted(columns)}")
        return requested
    for name in (INPUT_IDS, TEXT):
        if name in columns:
            return name
    if len(columns) == 1:
        return columns[0]
    raise PosEncError(f"Cannot tell which of the columns {sorted(columns)} is the text: set --text-column")


def _load_saved(path: Path, split: str, streaming: bool) -> Dataset | IterableDataset:
    from datasets import DatasetDict, load_from_disk

    dataset = load_from_disk(str(path))
    if isinstance(dataset, DatasetDict):
        if split not in dataset:
            raise PosEncError(f"{path} has no split {split!r}; expected one of {sorted(dataset)}")
        dataset = dataset[split]
    return dataset.to_iterable_dataset() if streaming else dataset


def _find_files(path: Path) -> list[str]:
    if path.is_file():
        return [str(path)]
    if path.is_dir():
        return sorted(str(file) for file in path.rglob("*") if file.suffix.lower() in BUILDERS)
    return sorted(file for file in glob.glob(str(path), recursive=True) if Path(file).is_file())


def _select_builder(files: list[str], source: str) -> str:
    builders = {BUILDERS.get(Path(file).suffix.lower()) for file in files}
    builder = builders.pop()
    if builders or builder is None:
        raise PosEncError(f"{source} must contain files of a single type; supported extensions: {sorted(BUILDERS)}")
    return builder


def _is_local_path(source: str) -> bool:
    return (
        source.startswith((".", "/", "~"))
        or source.count("/") > 1
        or any(character in source for character in "*?[")
        or Path(source).suffix.lower() in BUILDERS
    )
