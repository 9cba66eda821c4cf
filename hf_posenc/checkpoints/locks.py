"""One process at a time per output: a lock file next to it names the process that writes there.

The operating system releases a lock when its process ends, however it ends: a file left by a killed process locks
nothing, and the next process takes it over.
"""

from __future__ import annotations

import glob
import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from transformers.utils import logging

from ..errors import PosEncError
from ..validation import truncate_repr

fcntl: Any
try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

logger = logging.get_logger(__name__)
LOCK_FILE = ".hf_posenc.lock"
MAX_HOLDER_BYTES = 1000


@contextmanager
def lock_output(output: str | Path) -> Iterator[None]:
    """Hold the lock of a file or directory that is about to be written. Creates its parent directory.

    Temporary files that a killed process has left there, see `write_text`, are deleted. Directories that were created
    for the lock are removed at the end if they are empty. If another process holds the lock, the error names it.
    """
    created: list[Path] = []
    try:
        try:
            path = Path(output).expanduser().resolve()
            created = [parent for parent in path.parents if not parent.exists()]
            path.parent.mkdir(parents=True, exist_ok=True)
            file = _lock_file(path)
            handle = _acquire(file, output)
        except (OSError, RuntimeError) as error:  # RuntimeError: a link to itself, an unknown home directory
            raise PosEncError(f"Cannot write {output}: {error}") from error
        try:
            leftovers = [*path.parent.glob(temporary_name(glob.escape(path.name), "[0-9]*"))]
            leftovers += path.glob(temporary_name("*", "[0-9]*")) if path.is_dir() else []
            for leftover in leftovers:
                leftover.unlink(missing_ok=True)
            yield
        finally:
            with suppress(OSError):
                file.unlink()
            os.close(handle)
    finally:
        for parent in created:
            with suppress(OSError):  # it is in use
                parent.rmdir()


def temporary_name(name: str, process: object) -> str:
    """The name of a file while a process writes it."""
    return f".{name}.{process}.tmp"


def _lock_file(path: Path) -> Path:
    """The lock file is next to the output, or inside a directory that nothing can be written next to."""
    if path.is_dir() and (os.path.ismount(path) or not os.access(path.parent, os.W_OK)):
        return path / LOCK_FILE
    return path.with_name(f".{path.name}.lock")


def _acquire(file: Path, output: str | Path) -> int:
    """Open a lock file, lock it, and write who holds it."""
    while True:
        handle = os.open(file, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o644)
        try:
            _lock(handle, output)
            is_current = file.exists() and os.path.samestat(os.fstat(handle), file.stat())
            if is_current:  # else its holder has just finished and removed it
                holder = {"pid": os.getpid(), "host": socket.gethostname(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}
                os.ftruncate(handle, 0)
                os.pwrite(handle, json.dumps(holder).encode(), 0)
                return handle
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)


def _lock(handle: int, output: str | Path) -> None:
    if fcntl is None:
        logger.warning(f"This system has no file locks: let no other process write {output}")
        return
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise PosEncError(
            f"{output} is in use by {_describe_holder(handle)}: wait until it ends, or choose another output"
        ) from None
    except OSError as error:  # some network file systems
        logger.warning(f"The disk of {output} has no file locks ({error}): let no other process write there")


def _describe_holder(handle: int) -> str:
    try:
        holder = json.loads(os.pread(handle, MAX_HOLDER_BYTES, 0))
        return truncate_repr(f"process {holder['pid']} on {holder['host']} since {holder['since']}", str)
    except (OSError, ValueError, TypeError, KeyError):  # it has the lock, and has not written its name yet
        return "another process"
