"""Whether a directory is whole: a list of its files, with their sizes and checksums, written when all are there."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from .disk import fsync

MANIFEST = "manifest.json"
_PIECE = 1 << 22


def write_manifest(directory: Path) -> None:
    """Have every file on the disk for good, and list them."""
    files = {path.relative_to(directory).as_posix(): path for path in sorted(directory.rglob("*")) if path.is_file()}
    listed = {name: {"size": path.stat().st_size, "sha256": _digest(path)} for name, path in files.items()}
    manifest = directory / MANIFEST
    manifest.write_text(json.dumps(listed, indent=1), encoding="utf-8")
    for path in (*files.values(), manifest, directory):
        fsync(path)


def verify_manifest(directory: Path) -> str | None:
    """None if the directory is as it was when it was sealed."""
    try:
        listed = json.loads((directory / MANIFEST).read_text(encoding="utf-8"))
        wanted = {name: (entry["size"], entry["sha256"]) for name, entry in listed.items()}
    except (OSError, ValueError, AttributeError, TypeError, KeyError, RecursionError) as error:
        return f"its {MANIFEST} cannot be read ({error!r})"
    for name, (size, digest) in wanted.items():
        path = directory / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != size:
            return f"{name} has {path.stat().st_size:,} bytes and should have {size:,}"
        if _digest(path) != digest:
            return f"{name} is not what was written"
    return None


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(_PIECE):
            digest.update(piece)
    return digest.hexdigest()
