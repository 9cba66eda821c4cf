"""Text that every Python installation has: the source code of the standard library, tokenized into bytes."""

from __future__ import annotations

import dataclasses
import random
import sysconfig
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

END_OF_TEXT = "<|endoftext|>"
VALIDATION_FRACTION = 4
"""The validation text is this many times shorter than the test text."""
HELD_OUT_MODULES = 8
"""Modules in the validation and test texts, in equal parts, since a single module may be untypical."""


@dataclasses.dataclass(frozen=True)
class TextFiles:
    """Text files without a module in common."""

    train: Path
    validation: Path
    test: Path


def write_texts(directory: Path, train_size: int, test_size: int) -> TextFiles:
    """Shuffle the modules of the standard library with a fixed seed and split them."""
    modules = [text for text in map(_read, _source_files()) if text]
    random.Random(0).shuffle(modules)
    directory.mkdir(parents=True, exist_ok=True)
    files = TextFiles(*(directory / f"{name}.txt" for name in ("train", "validation", "test")))
    for path, size in ((files.test, test_size), (files.validation, test_size // VALIDATION_FRACTION)):
        excerpt = size // HELD_OUT_MODULES
        held_out = [module for module in modules if len(module) >= excerpt][:HELD_OUT_MODULES]
        modules = [module for module in modules if module not in held_out]
        _write(path, "".join(module[:excerpt] for module in held_out))
    _write(files.train, "".join(modules)[:train_size])
    return files


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte, plus one for the end of a text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: number for number, letter in enumerate([*alphabet, END_OF_TEXT])}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    special_tokens = dict.fromkeys(("bos_token", "eos_token", "pad_token"), END_OF_TEXT)
    return PreTrainedTokenizerFast(tokenizer_object=backend, **special_tokens)


def _source_files() -> list[Path]:
    library = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(library.glob("*.py"))
    if not files:
        raise SystemExit(f"No source files of the standard library in {library}; run the demo with another Python.")
    return files


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return ""


def _write(path: Path, text: str) -> None:
    if not text:
        raise SystemExit("The standard library of this Python has too little source code; run the demo with another.")
    path.write_text(text, encoding="utf-8", newline="\n")
