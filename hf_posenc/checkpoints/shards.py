"""safetensors files by their headers: what is in them, whether they are whole, and copies that lack some tensors.

Nothing is read but headers; data goes from file to file in pieces, so that a shard of any size needs little memory.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import shutil
from pathlib import Path
from typing import Any, BinaryIO

from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

PIECE = 16 * 2**20
LARGEST_HEADER = 100_000_000
"""As the format has it."""
BYTES = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 1),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 2),
    **dict.fromkeys(("U32", "I32", "F32"), 4),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 8),
}
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".joblib")
"""Endings of files that are, or may be, pickles: none is ever read."""


class CorruptShard(ValueError):
    """A file that is not the safetensors file it should be."""


@dataclasses.dataclass(frozen=True)
class Entry:
    """One tensor of a shard: bytes `start` to `stop` of its data."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def numbers(self) -> int:
        return math.prod(self.shape)


@dataclasses.dataclass(frozen=True)
class Shard:
    """A safetensors file whose header fits its size."""

    path: Path
    entries: dict[str, Entry]
    metadata: dict[str, str]
    data_start: int

    @classmethod
    def read(cls, path: Path) -> Shard:
        """Read the header, and raise CorruptShard if it is not one, or if the file does not end where it says."""
        try:
            size = path.stat().st_size
            with path.open("rb") as file:
                length = int.from_bytes(file.read(8), "little")
                if size < 8 or length > min(size - 8, LARGEST_HEADER):
                    raise CorruptShard(f"{path} is cut off or no safetensors file: its header does not fit in it")
                header = json.loads(file.read(length).decode("utf-8"))
        except FileNotFoundError:
            raise CorruptShard(f"{path} is missing") from None
        except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
            raise CorruptShard(f"{path} is no safetensors file: {error}") from None
        if not isinstance(header, dict):
            raise CorruptShard(f"{path} is no safetensors file: its header is no table of tensors")
        metadata = header.pop("__metadata__", None) or {}
        entries = {name: _entry(path, name, value) for name, value in header.items()}
        end = 0
        for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].stop)):
            if entry.start != end:
                raise CorruptShard(f"{path}: tensor {name!r} begins at byte {entry.start} of the data, not {end}")
            end = entry.stop
        if 8 + length + end != size:
            raise CorruptShard(f"{path} is {size:,} bytes long, but its header tells of {8 + length + end:,}")
        return cls(path, entries, metadata, 8 + length)

    def link_or_copy(self, target: Path) -> None:
        """The same file under another name where the file system can, else a copy.

        safetensors replaces files that it saves to, so that saving over the one leaves the other as it is.
        """
        real = self.path.resolve()
        try:
            os.link(real, target)
        except OSError:
            shutil.copyfile(real, target)

    def write(self, target: Path, without: set[str], row_orders: dict[str, list[int]]) -> None:
        """A copy that lacks some tensors, and has the rows of others in another order; all else keeps its bytes.

        An order is that of some rows, and is repeated for as many more as there are.
        """
        kept = {name: entry for name, entry in self.entries.items() if name not in without}
        ordered = sorted(kept.items(), key=lambda item: item[1].start)
        header: dict[str, Any] = {"__metadata__": self.metadata} if self.metadata else {}
        place = 0
        for name, entry in ordered:
            size = entry.stop - entry.start
            header[name] = {"dtype": entry.dtype, "shape": list(entry.shape), "data_offsets": [place, place + size]}
            place += size
        text = json.dumps(header, separators=(",", ":")).encode("utf-8")
        text += b" " * (-len(text) % 8)
        with self.path.open("rb") as source, target.open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for name, entry in ordered:
                source.seek(self.data_start + entry.start)
                if name in row_orders:
                    _copy_rows(source, file, entry, row_orders[name])
                else:
                    _copy_bytes(source, file, entry.stop - entry.start)


def _entry(path: Path, name: str, value: Any) -> Entry:
    try:
        dtype, shape, (start, stop) = value["dtype"], tuple(value["shape"]), value["data_offsets"]
        numbers = [*shape, start, stop]
        if not all(type(number) is int and number >= 0 for number in numbers) or dtype not in BYTES:
            raise ValueError(value)
    except (KeyError, TypeError, ValueError) as error:
        raise CorruptShard(f"{path}: the header's entry of {name!r} is none ({error!r})") from None
    if stop - start != math.prod(shape) * BYTES[dtype]:
        raise CorruptShard(f"{path}: tensor {name!r} of shape {shape} has {stop - start:,} bytes of {dtype}")
    return Entry(dtype, shape, start, stop)


def _copy_bytes(source: BinaryIO, target: BinaryIO, count: int) -> None:
    while count:
        piece = source.read(min(count, PIECE))
        if not piece:
            raise CorruptShard(f"{source.name} ended while it was read")
        target.write(piece)
        count -= len(piece)


def _copy_rows(source: BinaryIO, target: BinaryIO, entry: Entry, order: list[int]) -> None:
    """Rows of a tensor, each run of as many as there are in `order` put into it."""
    row = (entry.stop - entry.start) // entry.shape[0]
    for _ in range(entry.shape[0] // len(order)):
        run = source.read(row * len(order))
        for place in order:
            target.write(run[place * row : (place + 1) * row])


def read_shards(directory: Path) -> tuple[Shard, ...]:
    """The shards of a checkpoint, one or by its index, as transformers looks for them.

    Raises ValueError if they are not all there and whole.
    """
    index_path, single = directory / SAFE_WEIGHTS_INDEX_NAME, directory / SAFE_WEIGHTS_NAME
    if single.is_file():
        return (Shard.read(single),)
    if index_path.is_file():
        try:
            weight_map = json.loads(index_path.read_text(encoding="utf-8"))["weight_map"]
            files = sorted(set(weight_map.values()))
        except (UnicodeDecodeError, json.JSONDecodeError, RecursionError, KeyError, TypeError, AttributeError) as error:
            raise CorruptShard(f"{index_path} is no index of shards: {error!r}") from None
        if any(not isinstance(name, str) or Path(name).name != name for name in files):
            raise CorruptShard(f"{index_path} names files outside of {directory}")
        shards = tuple(Shard.read(directory / name) for name in files)
        for name, file in weight_map.items():
            if not any(shard.path.name == file and name in shard.entries for shard in shards):
                raise CorruptShard(f"{index_path} has tensor {name!r} in {file}, which lacks it")
        return shards
    found = pickles_in(directory)
    instead = (
        f" There is {found[0]}, a pickle, which could run anything on your machine when it is read." if found else ""
    )
    raise ValueError(
        f"{directory} has no {SAFE_WEIGHTS_NAME}: only safetensors are read.{instead} A checkpoint of another format "
        "can be loaded, if you trust it, and saved again with save_pretrained"
    )


def pickles_in(directory: Path) -> list[str]:
    """Paths inside of a directory of the files that are pickles by their name."""
    found = (path for path in directory.rglob("*") if path.suffix.lower() in PICKLES and path.is_file())
    return sorted(path.relative_to(directory).as_posix() for path in found)
