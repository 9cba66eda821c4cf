"""Text that is there wherever Python is: the sources of its standard library, and bytes as its tokens."""

from __future__ import annotations

import dataclasses
import random
import sysconfig
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

END = "<|endoftext|>"
WATCHED = 4
"""The text to look at while a model recovers is so many times shorter than the one to measure on in the end."""
HELD_BACK = 8
"""Modules that the text to measure on is made of, an equal part of each: one alone may be unlike all others."""


@dataclasses.dataclass(frozen=True)
class Texts:
    """Files of text, of modules that are in one of them only."""

    train: Path
    watched: Path
    """Not learnt from: to see how far a model has come."""
    test: Path
    """Not seen before the end."""


def write_texts(directory: Path, size: int, test_size: int) -> Texts:
    """Modules in an order by chance, the same every time: some for the test, some to watch, and the rest to train."""
    modules = [text for text in map(_read, _sources()) if text]
    random.Random(0).shuffle(modules)
    directory.mkdir(parents=True, exist_ok=True)
    texts = Texts(*(directory / f"{name}.txt" for name in ("train", "watched", "test")))
    for path, wanted in ((texts.test, test_size), (texts.watched, test_size // WATCHED)):
        part = wanted // HELD_BACK
        held = [module for module in modules if len(module) >= part][:HELD_BACK]
        modules = [module for module in modules if module not in held]
        _write(path, "".join(module[:part] for module in held))
    _write(texts.train, "".join(modules)[:size])
    return texts


def _write(path: Path, text: str) -> None:
    if not text:
        raise SystemExit("the sources of this Python's standard library are too few to train on: take another one")
    path.write_text(text, encoding="utf-8", newline="\n")


def _sources() -> list[Path]:
    library = Path(sysconfig.get_paths()["stdlib"])
    found = sorted(library.glob("*.py"))
    if not found:
        raise SystemExit(f"this Python has its standard library without sources, in {library}: take another one")
    return found


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return ""


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A token for each byte, in the alphabet that GPT-2 writes bytes in, and one that ends a text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = {letter: number for number, letter in enumerate([*alphabet, END])}
    backend = Tokenizer(models.BPE(vocab=words, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token=END, eos_token=END, pad_token=END)
