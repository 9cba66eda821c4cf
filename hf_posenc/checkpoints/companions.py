"""Companion files of a checkpoint: what is copied or uploaded along with its weights.

Code of the checkpoint's author stays behind: `from_pretrained(..., trust_remote_code=True)` of a variant would run it.
Files of sentence-transformers that name other code are refused: without it, embeddings would silently be different.
"""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ..config import REMOTE_CODE_MODULE
from ..errors import PosEncError
from ..validation import truncate_repr
from .config_fields import check_implementations
from .files import COMPANION_FILES, PICKLE_SUFFIXES
from .links import check_links
from .source import read_json, read_json_object

ARRAY_SUFFIXES = (".npy", ".npz")
"""Arrays may contain pickles."""
CODE_SUFFIXES = (".py", ".pyc", ".pyd", ".so", ".dll", ".dylib", ".sh", ".ipynb")
MODULES_FILE, MODULE_CONFIG = "modules.json", re.compile(r"[0-9][^/]*_[^/]*/config\.json")
LIBRARY_CLASS = re.compile(r"(sentence_transformers|torch\.nn)(\.\w+)+", re.ASCII)
CODE_FIELDS = ("auto_map", "custom_pipelines")
"""Fields of JSON files that name classes in code files, which `trust_remote_code=True` imports."""


@dataclasses.dataclass(frozen=True)
class Companions:
    """Companion files to copy or upload, and what is left out.

    Attributes:
        files: By relative path: where the file is, or its content if fields that name code were removed from it.
        left_out: Code and pickles, and the removed fields.
    """

    files: dict[str, Path | bytes]
    left_out: tuple[str, ...]

    @classmethod
    def read(cls, directory: Path) -> Companions:
        """List the companion files of a checkpoint. Raises `PosEncError` for links to other places and foreign code."""
        matches = {path for pattern in COMPANION_FILES for path in directory.glob(pattern) if path.is_file()}
        excluded = (*PICKLE_SUFFIXES, *ARRAY_SUFFIXES, *CODE_SUFFIXES)
        files: dict[str, Path | bytes] = {}
        left_out = {path.name for path in directory.glob("*.py") if path.stem != REMOTE_CODE_MODULE}
        for path in sorted(matches):
            name = path.relative_to(directory).as_posix()
            if path.suffix.lower() in excluded:
                left_out.add(name)
                continue
            files[name], removed = _without_code(path)
            left_out.update(f"{field} in {name}" for field in removed)
        check_links(directory, files)
        _check_modules(directory, files)
        return cls(files, tuple(sorted(left_out)))

    def copy_to(self, directory: Path, replace: bool = True) -> None:
        """Write the files into a directory, as copies: tokenizers write into their files in place.

        Without `replace`, those that are there already stay.
        """
        for name, content in self.files.items():
            target = directory / name
            if target.exists() and not replace:
                continue
            target.parent.mkdir(parents=True, exist_ok=True)
            if isinstance(content, bytes):
                target.write_bytes(content)
            else:
                shutil.copyfile(content, target)


def _check_modules(directory: Path, names: Iterable[str]) -> None:
    """Refuse classes of sentence-transformers' pipeline that neither it nor PyTorch provides: it would import them."""
    for name in names:
        path = directory / name
        if name == MODULES_FILE:
            modules = read_json(path)
            if not isinstance(modules, list) or not all(isinstance(module, dict) for module in modules):
                raise PosEncError(f"{path} is not a list of modules: correct or remove it")
            classes = [module.get("type") for module in modules]
        elif MODULE_CONFIG.fullmatch(name):
            classes = [read_json_object(path).get("activation_function", "torch.nn.Identity")]
        else:
            continue
        foreign = [entry for entry in classes if not (isinstance(entry, str) and LIBRARY_CLASS.fullmatch(entry))]
        if foreign:
            raise PosEncError(
                f"{path} names {truncate_repr(foreign[0])}, which is not a class of sentence-transformers or PyTorch. "
                "Code of a checkpoint's author is never carried along, and without it, embeddings would be different: "
                "remove the entry, or the file to use the model without sentence-transformers"
            )


def _without_code(path: Path) -> tuple[Path | bytes, list[str]]:
    """A file, or its content without the fields that name code; and these fields."""
    if not (path.suffix.lower() == ".json" and "config" in path.name):
        return path, []
    fields = read_json_object(path)
    check_implementations(fields, path)
    removed = remove_code_fields(fields)
    return to_json_bytes(fields) if removed else path, removed


def to_json_bytes(fields: dict[str, Any]) -> bytes:
    """The content of a JSON file with these fields."""
    return (json.dumps(fields, indent=2) + "\n").encode()


def remove_code_fields(fields: dict[str, Any]) -> list[str]:
    """Remove the fields that name code in files, except those of the variant itself; returns their names."""
    removed = [name for value in fields.values() if isinstance(value, dict) for name in remove_code_fields(value)]
    for field in CODE_FIELDS:
        entries = fields.get(field)
        kept = {name: entry for name, entry in entries.items() if _is_own(entry)} if isinstance(entries, dict) else {}
        if entries is not None and kept != entries:
            removed.append(field)
            fields.pop(field)
            fields |= {field: kept} if kept else {}
    return removed


def _is_own(entry: object) -> bool:
    """Whether an entry of auto_map names a class of the module that `write_remote_code_module` writes."""
    return isinstance(entry, str) and re.fullmatch(rf"{REMOTE_CODE_MODULE}\.\w+", entry) is not None
