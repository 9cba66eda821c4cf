"""Where text comes from: files, datasets that were saved, the Hub."""

from __future__ import annotations

import glob
from pathlib import Path
from typing import Any

BUILDERS = {
    ".txt": "text",
    ".text": "text",
    ".md": "text",
    ".json": "json",
    ".jsonl": "json",
    ".csv": "csv",
    ".parquet": "parquet",
}
"""The reader of `datasets` for each kind of file."""
IDS, TEXT = "input_ids", "text"


def read(source: str, split: str = "train", streaming: bool = False) -> Any:
    """A dataset of `datasets`: of a file, a directory or pattern of files, a directory that `save_to_disk` wrote, or
    the Hub. A text file is one document; other files have one in each row.
    """
    from datasets import load_dataset

    path = Path(source).expanduser()
    if (path / "dataset_dict.json").is_file() or (path / "state.json").is_file():
        return _saved(path, split, streaming)
    files = _files(path)
    if files:
        builder = _builder(files, source)
        extra = {"sample_by": "document"} if builder == "text" else {}
        return load_dataset(builder, data_files=files, split="train", streaming=streaming, **extra)
    if _looks_local(source):
        raise ValueError(f"there is no data at {source}: name a file, a directory or pattern of files, or a Hub id")
    try:
        return load_dataset(source, split=split, streaming=streaming)
    except (OSError, ValueError) as error:
        raise ValueError(f"{source!r} is no file here, and the Hub did not give it as a dataset: {error}") from error


def _saved(path: Path, split: str, streaming: bool) -> Any:
    from datasets import DatasetDict, load_from_disk

    found = load_from_disk(str(path))
    if isinstance(found, DatasetDict):
        if split not in found:
            raise ValueError(f"{path} has the splits {sorted(found)}, and no {split!r}")
        found = found[split]
    return found.to_iterable_dataset() if streaming else found


def _files(path: Path) -> list[str]:
    if path.is_file():
        return [str(path)]
    if path.is_dir():
        return sorted(str(found) for found in path.rglob("*") if found.suffix.lower() in BUILDERS)
    return sorted(found for found in glob.glob(str(path), recursive=True) if Path(found).is_file())


def _builder(files: list[str], source: str) -> str:
    kinds = {BUILDERS.get(Path(file).suffix.lower()) for file in files}
    kind = kinds.pop()
    if kinds or kind is None:
        raise ValueError(f"{source} must be files of one kind, ending in one of {sorted(BUILDERS)}")
    return kind


def _looks_local(source: str) -> bool:
    return (
        source.startswith((".", "/", "~"))
        or source.count("/") > 1
        or any(letter in source for letter in "*?[")
        or Path(source).suffix.lower() in BUILDERS
    )


def text_column(columns: list[str], wanted: str | None) -> str:
    """The column to read: the one that is asked for, ids that are there already, or the text."""
    if wanted is not None:
        if wanted not in columns:
            raise ValueError(f"the data has no column {wanted!r}; it has {sorted(columns)}")
        return wanted
    for name in (IDS, TEXT):
        if name in columns:
            return name
    if len(columns) == 1:
        return columns[0]
    raise ValueError(f"which column is the text? The data has {sorted(columns)}: name one with --text-column")
