"""`hf-posenc enable` and `disable`, the classes on the transformers module, and unsupported releases of it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from typer.testing import CliRunner

import hf_posenc
from hf_posenc.cli import app, autoload
from hf_posenc.errors import PosEncError
from hf_posenc.patches import import_hooks
from tests.support import tiny_models as tiny

ROOT = Path(__file__).parents[2]
LOAD = """
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained({directory!r})
import sys, transformers
assert type(model).__name__ == "PosEncGPT2LMHeadModel"
assert getattr(transformers, model.config.architectures[0]) is type(model)
"""
READ_PATH_FILES = "import site; site.addsitedir({directory!r})\n"


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, cwd=ROOT)


@pytest.fixture
def hooked(tmp_path: Path) -> Path:
    directory = tmp_path / "site"
    directory.mkdir()
    assert autoload.install_hook([tmp_path / "not there", directory]) == directory
    return directory


@pytest.mark.slow
def test_variants_load_without_importing_the_plugin(tmp_path: Path, hooked: Path) -> None:
    tiny.model("gpt2", "alibi", torch.float32).save_pretrained(tmp_path / "variant")
    load = LOAD.format(directory=str(tmp_path / "variant"))
    done = run(READ_PATH_FILES.format(directory=str(hooked)) + load)
    assert done.returncode == 0, done.stderr
    assert autoload.remove_hook([hooked]) == [hooked]
    assert not list(hooked.iterdir())
    assert autoload.remove_hook([hooked]) == []


def test_nothing_is_imported_before_transformers(hooked: Path) -> None:
    code = READ_PATH_FILES.format(directory=str(hooked)) + (
        "import sys; before = set(sys.modules); import json, email; import hf_posenc_autoload\n"
        "assert not [name for name in sys.modules if name.startswith(('hf_posenc.', 'transformers', 'torch'))]\n"
        "assert 'hf_posenc' not in sys.modules"
    )
    done = run(code)
    assert done.returncode == 0, done.stderr


def test_start_up_costs_less_than_5_ms(hooked: Path) -> None:
    """In processor time, which does not depend on what else runs; the first start compiles the file."""
    code = "import sys, time; sys.path.insert(0, {!r}); start = time.thread_time(); import hf_posenc_autoload; "
    code = code.format(str(hooked)) + "print(time.thread_time() - start)"
    assert min(float(run(code).stdout) for _ in range(3)) < 0.005


@pytest.mark.parametrize("version", ["4.57.1", "5.3.0", "6.0.0.dev0"])
def test_other_releases_are_named(version: str, tmp_path: Path, hooked: Path) -> None:
    (tmp_path / "transformers").mkdir()
    (tmp_path / "transformers" / "__init__.py").write_text(f"__version__ = {version!r}\n")
    place = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
    expected = f"hf_posenc supports transformers >=5.4,<6, but transformers {version} is installed"
    for order in ("import hf_posenc, transformers", "import transformers, hf_posenc"):
        done = run(place + order)
        assert done.returncode != 0
        assert done.stderr.splitlines()[-1].startswith(f"ImportError: {expected}"), done.stderr
    # A program that did not ask for the plugin goes on.
    done = run(place + READ_PATH_FILES.format(directory=str(hooked)) + "import transformers; print('works')")
    assert (done.returncode, done.stdout) == (0, "works\n"), done.stderr
    assert expected in done.stderr


def test_a_leftover_hook_does_nothing(hooked: Path) -> None:
    code = READ_PATH_FILES.format(directory=str(hooked)) + "sys = site.sys; sys.modules['hf_posenc'] = None\n"
    done = run(code + "import transformers; print(transformers.__version__)")
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    assert done.stdout.strip() == transformers.__version__


def test_supported_releases_are_those_of_the_package() -> None:
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert f'"transformers{import_hooks.SUPPORTED_RELEASES}"' in project
    assert f">={import_hooks.OLDEST[0]}.{import_hooks.OLDEST[1]},<{import_hooks.TOO_NEW[0]}" == (
        import_hooks.SUPPORTED_RELEASES
    )


def test_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(autoload, "_site_directories", lambda: [tmp_path])
    assert str(tmp_path) in CliRunner().invoke(app, ["enable"]).output
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf_posenc_autoload.pth", "hf_posenc_autoload.py"]
    assert "Disabled" in CliRunner().invoke(app, ["disable"]).output
    assert "not enabled" in CliRunner().invoke(app, ["disable"]).output
    with pytest.raises(PosEncError, match="virtual environment"):
        autoload.install_hook([tmp_path / "nowhere"])


def test_version() -> None:
    result = CliRunner().invoke(app, ["--version"])
    assert result.exit_code == 0
    assert re.match(
        rf"hf_posenc {re.escape(hf_posenc.__version__)} \(transformers 5\.\S+, torch \S+, Python ", result.output
    )


def test_classes_are_on_the_transformers_module() -> None:
    from hf_posenc.models import PosEncLlamaConfig, PosEncLlamaForCausalLM

    assert transformers.PosEncLlamaForCausalLM is PosEncLlamaForCausalLM
    assert transformers.PosEncLlamaConfig is PosEncLlamaConfig
    assert getattr(transformers, "PosEncNothing", None) is None
    assert not hasattr(transformers, "LlamaForNothing")
    assert transformers.LlamaForCausalLM.__name__ == "LlamaForCausalLM"
