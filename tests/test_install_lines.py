"""How to install the package is said in one place, and nothing tells people to install a name that anyone could own."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from hf_posenc import errors
from hf_posenc.config import SENTINEL, is_sentinel
from hf_posenc.errors import install_command
from tests.support import tiny_models as tiny

ROOT = Path(__file__).parents[1]
INSTALLS = re.compile(r"pip install[^\n`]*?hf_posenc[^\n`]*")
CHECKED = ("*.md", "*.py", "*.html", "*.yml", "*.yaml", "*.toml", "*.ipynb")


def test_the_source_is_the_repository_of_the_project() -> None:
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    repository = re.search(r'^Repository = "(.+)"$', project, re.MULTILINE)
    assert repository
    assert f"git+{repository[1]}" == errors.INSTALL_SOURCE
    assert install_command("train") == f"pip install 'hf_posenc[train] @ git+{repository[1]}'"


def test_on_an_index_the_name_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(errors, "INSTALL_SOURCE", None)
    assert install_command() == "pip install 'hf_posenc'"
    assert install_command("plots") == "pip install 'hf_posenc[plots]'"


def test_no_file_installs_the_bare_name() -> None:
    top_level = [path for path in ROOT.iterdir() if path.name[0] != "." and path.name not in ("tests", "site", "demo")]
    paths = [path for path in top_level if any(path.match(pattern) for pattern in CHECKED)]
    paths += [path for directory in top_level for pattern in CHECKED for path in directory.rglob(pattern)]
    lines = [line for path in paths for line in INSTALLS.findall(path.read_text(encoding="utf-8"))]
    assert len(lines) > 8
    for line in lines:
        assert " @ " in line, line


def test_a_mark_of_another_release_is_read(tmp_path: Path) -> None:
    """The install command changes with the first release; variants saved before it still load."""
    import json

    from transformers import AutoConfig

    config = tiny.config("bert", position_scheme="rope", hidden_act="relu")
    config.save_pretrained(tmp_path)
    text = (tmp_path / "config.json").read_text(encoding="utf-8")
    older = text.replace(json.dumps(SENTINEL)[1:-1], SENTINEL.replace(install_command(), "pip install 'hf_posenc'"))
    assert older != text
    (tmp_path / "config.json").write_text(older, encoding="utf-8")
    read = AutoConfig.from_pretrained(tmp_path)
    assert (read.hidden_act, read.initializer_range) == ("relu", config.initializer_range)
    assert is_sentinel(SENTINEL)
    assert not is_sentinel("relu")


def test_the_remote_code_says_how_to_install(tmp_path: Path) -> None:
    tiny.config("gpt2", position_scheme="rope").save_pretrained(tmp_path)
    code = "import sys; sys.modules['hf_posenc'] = None; import modeling_hf_posenc"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode != 0
    last = done.stderr.splitlines()[-1]
    assert last.startswith("ImportError: This model needs hf_posenc")
    assert install_command() in last
