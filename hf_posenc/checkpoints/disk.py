"""What is asked of disks, in a module that imports nothing of the package."""

from __future__ import annotations

import errno
import os
from pathlib import Path


def fsync(path: Path) -> None:
    """See to it that a file, or the names in a directory, are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def is_out_of_space(error: BaseException) -> bool:
    """As Python says it, or as the writer of safetensors does."""
    full = getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT)
    return full or any(words in str(error) for words in ("No space left on device", "Disk quota exceeded"))
