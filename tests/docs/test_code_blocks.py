"""Every code block of README.md and docs/ does what it says: run offline, beside small stand-ins for what it names.

A page that loads "openai-community/gpt2" finds a directory of that name: a GPT-2 of 1,024 positions and two narrow
layers. tests/run_page.py runs a page: in `make test` all of it in one process, in `make test-all` also as a shell does.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.support import code_blocks, hub_client
from tests.support import tiny_models as tiny
from tests.support import word_level_tokenizer as word_level
from tests.support.hub_fixtures import OWNER
from tests.support.hub_server import Hub

TESTS = Path(__file__).parents[1]
ROOT = TESTS.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
WITH_BLOCKS = [page for page in PAGES if code_blocks.blocks_of(page.read_text())]
NARROW = {"gpt2": {"n_embd": 16, "n_head": 2, "n_layer": 2, "n_positions": 1024}}
SAME = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 16}
NARROW["bert"] = {**SAME, "num_hidden_layers": 2, "max_position_embeddings": 512}
NARROW["llama"] = {**SAME, "num_hidden_layers": 4, "max_position_embeddings": 2048}
NAMES = {
    "gpt2": ("openai-community/gpt2", "gpt2", "my-gpt2"),
    "bert": ("google-bert/bert-base-uncased", "bert", "my-bert"),
    "llama": ("my-llama",),
}


@pytest.fixture(scope="session")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Everything that pages name and do not make themselves."""
    shelf = tmp_path_factory.mktemp("shelf")
    for architecture, names in NAMES.items():
        for name in names:
            word_level.saved(architecture, shelf / name, **NARROW[architecture])
    for name, architecture in (("variant", "gpt2"), ("bert-alibi", "bert")):
        sizes = NARROW[architecture] if architecture == "bert" else {}
        tiny.model(architecture, "alibi", torch.float32, **sizes).save_pretrained(shelf / name)
        word_level.tokenizer(architecture == "bert").save_pretrained(shelf / name)
    shutil.copytree(TESTS / "fixtures" / "bert_v4_relative_key", shelf / "old-bert")
    (shelf / "text.txt").write_text(word_level.text(9000))
    (shelf / "test.txt").write_text(word_level.text(4500, seed=1))
    return shelf


def run(page: Path, directory: Path, hub: Hub, *options: str) -> subprocess.CompletedProcess[str]:
    pushes = "hf-posenc push" in page.read_text()
    environment = hub_client.environment(hub.url, directory / ".home", OWNER)
    if not pushes:
        environment["HF_HUB_OFFLINE"] = "1"
    command = [sys.executable, str(TESTS / "support" / "browser.py"), str(page), *options]
    return subprocess.run(
        command, capture_output=True, text=True, cwd=directory, env=environment, timeout=900, check=False
    )


@pytest.mark.parametrize("way", ["in one process", pytest.param("as a shell", marks=pytest.mark.slow)])
@pytest.mark.parametrize("page", WITH_BLOCKS, ids=lambda page: page.stem)
def test_every_block_of_a_page_runs(page: Path, way: str, shelf: Path, tmp_path: Path, hub: Hub) -> None:
    directory = tmp_path / "page"
    shutil.copytree(shelf, directory)
    done = run(page, directory, hub, *(["--as-shell"] if way == "as a shell" else []))
    assert done.returncode == 0, done.stderr[-6000:]
    asked_for = [request for request in hub.requests if "me/gpt2-rope" not in request]
    assert not [request for request in asked_for if "/api/models/" in request or "/resolve/" in request], asked_for
    assert set(hub.repos) == ({"me/gpt2-rope"} if page.stem == "cli" else set())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_blocks_that_import_transformers_import_the_plugin(page: Path) -> None:
    """Blocks are copied one at a time, and without the plugin transformers does not know what a position_scheme is."""
    for block in code_blocks.blocks_of(page.read_text()):
        if block.kind is code_blocks.Kind.PYTHON and "from transformers import" in block.text:
            assert re.search(r"^(import|from) hf_posenc", block.text, re.MULTILINE), block.text


def test_contributing_names_targets_that_exist() -> None:
    """Its Python is a worked example, which tests/test_documents.py runs in a copy of the project."""
    from tests.support import browser as run_page

    page = (ROOT / "CONTRIBUTING.md").read_text()
    first = code_blocks.blocks_of(page[: page.index("## ")])
    assert [block.kind for block in first] == [code_blocks.Kind.COMMANDS]
    for words in code_blocks.lines_of(first[0]):
        run_page.run_command(words, as_shell=False)


@pytest.mark.parametrize(
    ("page", "why"),
    [
        ("```python\nprint(1)\n```\n\n```\n2\n```\n", "the page says"),
        ("```python\n1 / 0\n```\n", "ZeroDivisionError"),
        ("```\nhf-posenc inspect\n```\n", "exits with 2"),
        ("```\npip install hf_posenc[everything]\n```\n", "everything"),
        ("```\nmake coffee\n```\n", "coffee"),
        ("```toml\na = 1\n```\n", "of no kind"),
        ("some words\n\n```\nsome output of nothing\n```\n", "of no kind"),
        ("```python\nprint(1)\n", "not closed"),
    ],
)
def test_a_wrong_page_is_noticed(page: str, why: str, tmp_path: Path, hub: Hub) -> None:
    (tmp_path / "page.md").write_text(page)
    done = run(tmp_path / "page.md", tmp_path, hub)
    assert done.returncode != 0
    assert why in done.stderr
