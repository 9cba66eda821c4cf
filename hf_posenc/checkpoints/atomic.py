"""A directory that is there in whole or not at all: written beside its place, and then renamed."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from safetensors import SafetensorError

from .disk import fsync, is_out_of_space


def resolve_output_dir(out: str | Path, source: Path, force: bool) -> Path:
    """Where `out` is when all links are followed. Raises ValueError if nothing can, or should, be written there."""
    try:
        place, there, here = Path(out).expanduser().resolve(), source.resolve(), Path.cwd()
        if place == there or there in place.parents or place in there.parents:
            raise ValueError(f"{out} lies inside of the source {source}, or around it: name another directory")
        if place == here or place in here.parents:
            raise ValueError(f"{out} is the directory that you are in, or around it: name one inside of it")
        if not place.exists():
            return place
        if not place.is_dir():
            raise ValueError(f"{out} is a file: name a directory")
        if os.path.ismount(place):
            raise ValueError(f"{out} is where a file system is mounted, and stays: name a directory inside of it")
        if any(place.iterdir()) and not force:
            raise ValueError(
                f"{out} is there already and not empty: name another directory, or pass force=True (--force)"
            )
        return place
    except (OSError, RuntimeError) as error:  # a loop of links, a name too long, a home that nobody has
        raise ValueError(f"{out} cannot be written: {error}") from error


@contextmanager
def atomic_directory(place: Path, force: bool) -> Iterator[Path]:
    """A directory beside `place` to write to, which takes it when all is there; nothing is left otherwise."""
    made = [parent for parent in place.parents if not parent.exists()]
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        directory = _beside(place, "partial")
        try:
            directory.chmod(0o777 & ~_umask())
            yield directory
            _flush(directory)
            _put_in_place(directory, place, force)
            made = []
        finally:
            shutil.rmtree(directory, ignore_errors=True)
    except (OSError, SafetensorError) as error:
        if is_out_of_space(error):
            raise ValueError(f"no space left for {place}: nothing was written") from error
        raise ValueError(f"{place} could not be written, and nothing of it is left: {error}") from error
    finally:
        for parent in made:
            with suppress(OSError):  # somebody else's files are in it by now
                parent.rmdir()


def _beside(place: Path, what: str) -> Path:
    return Path(tempfile.mkdtemp(prefix=f".{place.name[:40]}.", suffix=f".{what}", dir=place.parent))


def _umask() -> int:
    value = os.umask(0)
    os.umask(value)
    return value


def _flush(directory: Path) -> None:
    """See to it that what was written is on the disk before its name is: a crash must not leave empty files."""
    for path in [*(p for p in directory.rglob("*") if p.is_file()), directory]:
        fsync(path)


def _put_in_place(directory: Path, place: Path, force: bool) -> None:
    if not (force and place.exists()):
        directory.replace(place)  # over an empty directory too, and never over one that has been filled meanwhile
        return
    old = _beside(place, "replaced")
    try:
        place.replace(old)
    except BaseException:
        old.rmdir()
        raise
    try:
        directory.replace(place)
    except BaseException:
        old.replace(place)
        raise
    shutil.rmtree(old, ignore_errors=True)
