"""Write files and directories safely: all or nothing, flushed to disk, and listed with checksums.

Also names the files that belong to a checkpoint.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from huggingface_hub.utils.sha import sha_fileobj
from safetensors import SafetensorError

from ..errors import PosEncError
from .locks import lock_output, temporary_name

WEIGHT_FILES = ("config.json", "*.safetensors", "model.safetensors.index.json")
TOKENIZER_FILES = ("tokenizer*", "vocab*", "merges.txt", "*.model")
COMPANION_FILES = (
    *TOKENIZER_FILES,
    "special_tokens_map.json",
    "added_tokens.json",
    "generation_config.json",
    "chat_template*",
    "additional_chat_templates/*",
    "preprocessor_config.json",
    "sentence_*_config.json",
    "config_sentence_transformers.json",
    "modules.json",
    "[0-9]*_*/config.json",
    "[0-9]*_*/model.safetensors",
)
"""Tokenizer, generation and sentence-transformers files that are copied along with the weights."""
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".joblib")
"""Suffixes of files that are or may be pickles. The package never reads any of them."""
RUN_STATE_FILE = "run.json"
"""The state of a training run, in its output directory."""
RECOVERY_FILE = "recovery.json"
"""Metrics measured at the end of training, shown on the model card."""
LENGTH_CURVE_FILE = "length_curve.json"
"""Perplexity by sequence length, shown on the model card."""
MANIFEST_FILE = "manifest.json"
NOT_EMPTY = "is not empty: choose another, or use force=True (--force)"


def list_pickles(directory: Path) -> list[str]:
    """List files anywhere in a directory that have a pickle's suffix, as relative paths."""
    matches = (path for path in directory.rglob("*") if path.suffix.lower() in PICKLE_SUFFIXES and path.is_file())
    return sorted(path.relative_to(directory).as_posix() for path in matches)


def list_checkpoints(directory: Path) -> list[Path]:
    """List the `checkpoint-N` directories of a training run, newest first."""
    matches = [path for path in directory.glob("checkpoint-*") if path.is_dir()]
    checkpoints = [path for path in matches if path.name.removeprefix("checkpoint-").isdecimal()]
    return sorted(checkpoints, key=checkpoint_step, reverse=True)


def checkpoint_step(checkpoint: Path) -> int:
    """The training step in the name of a `checkpoint-N` directory."""
    return int(checkpoint.name.rpartition("-")[2])


def fsync(path: Path) -> None:
    """Flush a file, or the entries of a directory, to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def is_out_of_space(error: BaseException) -> bool:
    """Whether an error, from Python or from safetensors, means that the disk or the quota is full."""
    if getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT):
        return True
    return any(message in str(error) for message in ("No space left on device", "Disk quota exceeded"))


def resolve_output_dir(output_dir: str | Path, source: Path, force: bool) -> Path:
    """Resolve an output directory, links included, or raise `PosEncError` if it may not be written."""
    try:
        target, source = Path(output_dir).expanduser().resolve(), source.resolve()
        if target.is_relative_to(source) or source.is_relative_to(target):
            problem = f"overlaps with the source {source}: choose another"
        elif Path.cwd().is_relative_to(target):
            problem = "contains the working directory: choose another"
        elif target.exists() and not target.is_dir():
            problem = "is a file: choose a directory"
        elif os.path.ismount(target):
            problem = "is a mount point: choose a directory inside it"
        elif not force and not _is_vacant(target):
            problem = NOT_EMPTY
        else:
            return target
    except (OSError, RuntimeError) as error:  # a link loop, a name that is too long, an unknown home directory
        problem = f"cannot be written: {error}"
    raise PosEncError(f"The output directory {output_dir} {problem}")


def _is_vacant(directory: Path) -> bool:
    return not directory.exists() or not any(directory.iterdir())


@contextmanager
def scratch_directory(target: Path) -> Iterator[Path]:
    """Yield a temporary directory next to `target`, on the same disk. What a killed process left there is removed."""
    scratch = target.with_name(f".{target.name}.scratch")
    with lock_output(scratch):
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir()
        try:
            yield scratch
        finally:
            shutil.rmtree(scratch, ignore_errors=True)


@contextmanager
def atomic_directory(target: Path, force: bool) -> Iterator[Path]:
    """Yield a temporary directory that becomes `target` on success and is removed on any error.

    If the process is killed, running it again removes what is left; a directory that was about to be replaced is
    brought back first.
    """
    try:
        with lock_output(target):
            staging, previous = (target.with_name(f".{target.name}.{state}") for state in ("partial", "replaced"))
            shutil.rmtree(staging, ignore_errors=True)
            if previous.exists() and _is_vacant(target):
                previous.replace(target)
            shutil.rmtree(previous, ignore_errors=True)
            if not force and not _is_vacant(target):
                raise PosEncError(f"The output directory {target} {NOT_EMPTY}")
            try:
                staging.mkdir()
                yield staging
                flush(staging)
                _replace_directory(staging, target, previous if force else None)
            finally:
                shutil.rmtree(staging, ignore_errors=True)
    except (OSError, SafetensorError) as error:
        if is_out_of_space(error):
            raise PosEncError(f"No space left on the disk of {target}; nothing was written") from error
        raise PosEncError(f"Could not write {target}, and removed what had been written: {error}") from error


def _replace_directory(new: Path, target: Path, previous: Path | None) -> None:
    """Rename a directory; an existing one is moved to `previous`, and deleted once the new one is in its place."""
    try:
        if previous is not None and target.exists():
            target.replace(previous)
        new.replace(target)  # fails if another process has put files there in the meantime
        fsync(target.parent)
    except BaseException:
        if previous is not None and previous.exists() and _is_vacant(target):
            previous.replace(target)
        raise
    if previous is not None:
        shutil.rmtree(previous, ignore_errors=True)


def move_files(source: Path, target: Path, last: str) -> None:
    """Move all files of a directory into another, and remove it. The file `last` tells readers that all are there.

    The target may have some of the files already: if the process is killed, the same files can be moved again.
    """
    flush(source)
    names = sorted(path.relative_to(source).as_posix() for path in source.rglob("*") if path.is_file())
    for name in sorted(names, key=lambda name: name == last):
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).replace(target / name)
    shutil.rmtree(source)
    fsync(target)


def write_text(path: str | Path, text: str) -> Path:
    """Write a file completely or not at all: a full disk, or a kill, leaves what was there before.

    Missing directories are created. Devices and pipes are written to, not replaced.
    """
    path, temporary = Path(path), None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and not path.is_file():  # a device or a pipe, which must not be replaced
            path.write_text(text, encoding="utf-8", newline="")
            return path
        target = path.resolve()
        temporary = target.with_name(temporary_name(target.name, os.getpid()))
        temporary.write_text(text, encoding="utf-8", newline="")
        fsync(temporary)
        temporary.replace(target)
    except (OSError, RuntimeError) as error:  # RuntimeError: a link to itself
        raise PosEncError(f"Cannot write {path}: {error}") from error
    finally:
        if temporary is not None:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
    return path


def check_writable(path: str | Path) -> Path:
    """Create the parent directory of a file, and fail early if the file cannot be written.

    The file itself is not created: if the process were killed, it would be left empty.
    """
    path = Path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            path.open("a", encoding="utf-8").close()
        else:
            temporary = path.with_name(temporary_name(path.name, os.getpid()))
            temporary.touch()
            temporary.unlink()
    except OSError as error:
        raise PosEncError(f"Cannot write {path}: {error}") from error
    return path


def flush(directory: Path) -> None:
    """Flush a directory and its files before it is renamed: a crash must not leave empty files under a final name."""
    for path in [*(path for path in directory.rglob("*") if path.is_file()), directory]:
        fsync(path)


def write_manifest(directory: Path) -> None:
    """List all files of a directory in manifest.json, with sizes and checksums, and flush them to disk."""
    files = {path.relative_to(directory).as_posix(): path for path in sorted(directory.rglob("*")) if path.is_file()}
    entries = {name: {"size": path.stat().st_size, "sha256": _sha256(path)} for name, path in files.items()}
    (directory / MANIFEST_FILE).write_text(json.dumps(entries, indent=1), encoding="utf-8")
    flush(directory)


def verify_manifest(directory: Path) -> str | None:
    """The first problem found when a directory is compared with its manifest, or None."""
    try:
        entries = json.loads((directory / MANIFEST_FILE).read_text(encoding="utf-8"))
        expected = {name: (entry["size"], entry["sha256"]) for name, entry in entries.items()}
    except (OSError, ValueError, AttributeError, TypeError, KeyError, RecursionError) as error:
        return f"{MANIFEST_FILE} cannot be read ({error!r})"
    for name, (size, sha256) in expected.items():
        path = directory / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != size:
            return f"{name} has {path.stat().st_size:,} bytes instead of {size:,}"
        if _sha256(path) != sha256:
            return f"{name} does not match its checksum"
    return None


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return sha_fileobj(file).hex()
