"""Every code block in README.md and docs/ runs offline, with small models in place of the ones it names.

A page that loads "openai-community/gpt2" finds a directory of that name with a tiny GPT-2. `make test` runs the README,
which has every command that changes or uses a model, and the pages without training. `make test-all` runs all pages,
and also each command in its own process (see tests/support/page_runner.py).
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hf_posenc.errors import install_command
from tests.support import hub_client, page_runner
from tests.support import tiny_models as tiny
from tests.support import word_level_tokenizer as word_level
from tests.support.code_blocks import Kind, parse_blocks, parse_commands
from tests.support.hub_fixtures import OWNER
from tests.support.hub_server import Hub

TESTS = Path(__file__).parents[1]
ROOT = TESTS.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
PAGES_WITH_CODE = [page for page in PAGES if parse_blocks(page.read_text())]
FAST_PAGES = ("README",)
RUNS = [
    pytest.param(
        page,
        mode,
        id=f"{page.stem}-{mode}",
        marks=[] if mode == "process" and page.stem in FAST_PAGES else pytest.mark.slow,
    )
    for page in PAGES_WITH_CODE
    for mode in ("process", "shell")
]
BERT_SIZES = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 16}
SIZES = {
    "gpt2": {"n_embd": 16, "n_head": 2, "n_layer": 2, "n_positions": 1024},
    "bert": {**BERT_SIZES, "num_hidden_layers": 2, "max_position_embeddings": 512},
    "llama": {**BERT_SIZES, "num_hidden_layers": 4, "max_position_embeddings": 2048},
}
CHECKPOINTS = {
    "gpt2": ("openai-community/gpt2", "gpt2", "my-gpt2"),
    "bert": ("google-bert/bert-base-uncased", "bert", "my-bert"),
    "llama": ("HuggingFaceTB/SmolLM2-135M", "my-llama"),
}


PUSH = re.compile(r"^hf-posenc push \S+ (?:--\S+ )*(me/[\w-]+)", re.MULTILINE)
"""A command of a code block, not of a sentence."""


@pytest.fixture(scope="session")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with every checkpoint and text that pages use without creating it."""
    directory = tmp_path_factory.mktemp("files")
    for architecture, names in CHECKPOINTS.items():
        for name in names:
            word_level.saved(architecture, directory / name, **SIZES[architecture])
    for name, architecture in (("variant", "gpt2"), ("bert-alibi", "bert")):
        sizes = SIZES[architecture] if architecture == "bert" else {}
        tiny.model(architecture, "alibi", torch.float32, **sizes).save_pretrained(directory / name)
        word_level.tokenizer(architecture == "bert").save_pretrained(directory / name)
    shutil.copytree(TESTS / "fixtures" / "bert_v4_relative_key", directory / "old-bert")
    (directory / "text.txt").write_text(word_level.text(9000))
    (directory / "test.txt").write_text(word_level.text(4500, seed=1))
    return directory


def run(page: Path, directory: Path, hub: Hub, *options: str) -> subprocess.CompletedProcess[str]:
    environment = hub_client.environment(hub.url, directory / ".home", OWNER)
    if not PUSH.search(page.read_text(encoding="utf-8")):
        environment["HF_HUB_OFFLINE"] = "1"
    return subprocess.run(
        [sys.executable, "-m", "tests.support.page_runner", str(page), *options],
        capture_output=True,
        text=True,
        cwd=directory,
        env=environment,
        timeout=900,
        check=False,
    )


@pytest.mark.parametrize(("page", "mode"), RUNS)
def test_all_blocks_of_a_page_run(page: Path, mode: str, files: Path, tmp_path: Path, hub: Hub) -> None:
    directory = tmp_path / "page"
    shutil.copytree(files, directory)
    done = run(page, directory, hub, *(["--shell"] if mode == "shell" else []))
    assert done.returncode == 0, done.stderr[-6000:]
    pushed = PUSH.findall(page.read_text(encoding="utf-8"))
    others = [request for request in hub.requests if not any(repo in request for repo in pushed)]
    assert not [request for request in others if "/api/models/" in request or "/resolve/" in request], others
    assert set(hub.repos) == set(pushed)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_blocks_that_import_transformers_import_the_plugin(page: Path) -> None:
    """Readers copy single blocks; without the plugin, transformers does not know position_scheme."""
    for block in parse_blocks(page.read_text()):
        if block.kind is Kind.PYTHON and "from transformers import" in block.text:
            assert re.search(r"^(import|from) hf_posenc", block.text, re.MULTILINE), block.text


@pytest.mark.parametrize(
    ("page", "message"),
    [
        ("```python\nprint(1)\n```\n\n```\n2\n```\n", "the page says"),
        pytest.param("```\nhf-posenc inspect\n```\n", "exited with 2", marks=pytest.mark.slow),
    ],
)
def test_a_failing_block_is_detected(page: str, message: str, tmp_path: Path, hub: Hub) -> None:
    (tmp_path / "page.md").write_text(page)
    done = run(tmp_path / "page.md", tmp_path, hub)
    assert done.returncode != 0
    assert message in done.stderr


@pytest.mark.parametrize(
    ("page", "message"),
    [
        ("```toml\na = 1\n```\n", "unknown kind"),
        ("some words\n\n```\nsome output of nothing\n```\n", "unknown kind"),
        ("```python\nprint(1)\n", "not closed"),
    ],
)
def test_a_block_of_unknown_kind_is_detected(page: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_blocks(page)


@pytest.mark.parametrize("command", ["pip install hf_posenc", install_command("everything"), "make coffee"])
def test_an_unknown_extra_or_target_is_detected(command: str) -> None:
    with pytest.raises(AssertionError):
        page_runner.run_command(parse_commands(parse_blocks(f"```\n{command}\n```\n")[0])[0], shell=False)
