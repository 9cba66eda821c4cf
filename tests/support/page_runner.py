"""Run the code blocks of a page in the directory it is started in: `run_page.py PAGE [--as-shell]`.

Python blocks share their names, as the cells of a notebook do. Commands of hf-posenc run in this process, which spares
each of them seconds of imports; with --as-shell every command is a process of its own, as a reader would run it.
`max_steps` is lowered to 3 wherever a page names it: that is the only change to what is on the page.
"""

from __future__ import annotations

import contextlib
import io
import re
import subprocess
import sys
import traceback
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tests.support.code_blocks import Block, Kind, blocks_of, lines_of

ROOT = Path(__file__).parents[2]
STEPS = re.compile(r"(max[-_]steps\W{1,2})\d+")
LAUNCH = ["accelerate", "launch", "-m", "hf_posenc"]


def run(page: str, as_shell: bool) -> None:
    names: dict[str, Any] = {"__name__": "__main__"}
    printed = ""
    for block in blocks_of(STEPS.sub(r"\g<1>3", page)):
        try:
            if block.kind is Kind.PYTHON:
                printed = run_python(block, names)
            elif block.kind is Kind.PRINTED:
                assert printed == block.text, f"it printed\n{printed}\nand the page says\n{block.text}"
            elif block.kind is Kind.FILE:
                Path(block.text.splitlines()[0].removeprefix("# ")).write_text(block.text, encoding="utf-8")
            else:
                for words in lines_of(block):
                    run_command(words, as_shell)
        except BaseException:
            print(f"in the block of line {block.line}:\n{block.text}", file=sys.stderr)
            raise


def run_python(block: Block, names: dict[str, Any]) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(block.text, f"block of line {block.line}", "exec"), names)
    return printed.getvalue()


def run_command(words: list[str], as_shell: bool) -> None:
    if words[0] == "pip":
        check_pip(words)
    elif words[0] == "make":
        check_make(words)
    elif words[0] == "lm_eval":
        check_harness(words)
    elif as_shell:
        run_process(words)
    elif words[0] == "hf-posenc":
        run_here(words[1:])
    else:
        assert words[:4] == LAUNCH, f"accelerate is launched as {LAUNCH}, not as {words}"
        run_here(words[4:])


def run_here(arguments: list[str]) -> None:
    from typer.testing import CliRunner

    from hf_posenc.cli import app

    done = CliRunner().invoke(app, arguments)
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        traceback.print_exception(done.exception)
    assert done.exit_code == 0, f"{arguments} exits with {done.exit_code}: {done.output}"


def run_process(words: list[str]) -> None:
    """The commands as modules of this Python: a checkout need not be installed for them to be found."""
    start = [sys.executable, "-m", "hf_posenc"]
    if words[0] == "accelerate":
        start = [sys.executable, "-m", "accelerate.commands.accelerate_cli"]
    done = subprocess.run([*start, *words[1:]], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, f"{words} exits with {done.returncode}: {done.stderr[-3000:]}"


def check_pip(words: list[str]) -> None:
    """Not run: it would change the environment that the tests run in. The name and its extras must be ours."""
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib  # a dependency of pytest

    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert words[1] == "install", words
    for wanted in words[2:]:
        found = re.fullmatch(r"([\w-]+)(?:\[([\w,]+)\])?", wanted)
        assert found, wanted
        assert found[1] == project["name"], wanted
        extras = set(found[2].split(",")) if found[2] else set()
        assert extras <= set(project["optional-dependencies"]), wanted


def check_make(words: list[str]) -> None:
    """Not run: some of them run these tests. The target must be there, and in the list of `make help`."""
    targets = re.findall(r"^([\w-]+):.*##", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    assert set(words[1:]) <= set(targets), words


def check_harness(words: list[str]) -> None:
    """Not run: its task is on the Hub; tests/test_harness.py runs the same with one of its own. What it shall load
    must be a variant, and its options those that the harness knows."""
    settings = dict(part.split("=") for part in words[words.index("--model_args") + 1].split(","))
    assert Path(settings["pretrained"], "modeling_hf_posenc.py").exists(), "no variant to evaluate"
    assert settings.keys() == {"pretrained", "trust_remote_code", "max_length"}, words
    if find_spec("lm_eval") is not None:
        from lm_eval._cli import HarnessCLI

        sys.argv = words
        assert HarnessCLI().parse_args().model == "hf"


if __name__ == "__main__":
    run(Path(sys.argv[1]).read_text(encoding="utf-8"), "--as-shell" in sys.argv[2:])
