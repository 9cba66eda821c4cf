"""Fixtures: a text, and stock checkpoints with a tokenizer for it.

Imports are inside of them, because the process that starts pytest-xdist's workers loads this file too.
"""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.support import word_level_tokenizer

    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(word_level_tokenizer.text(3000))
    return path


@pytest.fixture(scope="session")
def stock(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    from tests.support import word_level_tokenizer

    directory = tmp_path_factory.mktemp("stock")
    return {name: word_level_tokenizer.saved(name, directory / name) for name in ("bert", "gpt2", "llama")}
