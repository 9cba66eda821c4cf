"""Run the code blocks of a page in the current directory: `python -m tests.support.page_runner PAGE [--shell]`.

Python blocks share their variables, like the cells of a notebook. hf-posenc commands run in this process, which saves
seconds of imports per command; with --shell each command is a process of its own, as a reader would run it.
The only change to the text of the page: `max_steps` is lowered to 3.
"""

from __future__ import annotations

import contextlib
import io
import re
import shlex
import subprocess
import sys
import traceback
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hf_posenc.errors import install_command
from tests.support.code_blocks import Block, Kind, parse_blocks, parse_commands

ROOT = Path(__file__).parents[2]
MAX_STEPS = re.compile(r"(max[-_]steps\W{1,2})\d+")
LAUNCHER = ["accelerate", "launch", "-m", "hf_posenc"]


def run_page(page: str, shell: bool) -> None:
    variables: dict[str, Any] = {"__name__": "__main__"}
    printed = ""
    for block in parse_blocks(MAX_STEPS.sub(r"\g<1>3", page)):
        try:
            if block.kind is Kind.PYTHON:
                printed = run_python(block, variables)
            elif block.kind is Kind.OUTPUT:
                assert printed == block.text, f"the code printed\n{printed}\nbut the page says\n{block.text}"
            elif block.kind is Kind.FILE:
                Path(block.text.splitlines()[0].removeprefix("# ")).write_text(block.text, encoding="utf-8")
            else:
                for command in parse_commands(block):
                    run_command(command, shell)
        except BaseException:
            print(f"in the block at line {block.line}:\n{block.text}", file=sys.stderr)
            raise


def run_python(block: Block, variables: dict[str, Any]) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(block.text, f"block at line {block.line}", "exec"), variables)
    return printed.getvalue()


def run_command(command: list[str], shell: bool) -> None:
    if command[0] == "pip":
        check_pip(command)
    elif command[0] == "make":
        check_make(command)
    elif command[0] == "lm_eval":
        check_harness(command)
    elif shell:
        run_in_subprocess(command)
    elif command[0] == "hf-posenc":
        run_in_process(command[1:])
    else:
        assert command[:4] == LAUNCHER, f"expected a command that starts with {LAUNCHER}, got {command}"
        run_in_process(command[4:])


def run_in_process(arguments: list[str]) -> None:
    from typer.testing import CliRunner

    from hf_posenc.cli import app

    result = CliRunner().invoke(app, arguments)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        traceback.print_exception(result.exception)
    assert result.exit_code == 0, f"{arguments} exited with {result.exit_code}: {result.output}"


def run_in_subprocess(command: list[str]) -> None:
    """Run console scripts as modules of this Python, so the checkout need not be installed."""
    start = [sys.executable, "-m", "hf_posenc"]
    if command[0] == "accelerate":
        start = [sys.executable, "-m", "accelerate.commands.accelerate_cli"]
    done = subprocess.run([*start, *command[1:]], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, f"{command} exited with {done.returncode}: {done.stderr[-3000:]}"


def check_pip(command: list[str]) -> None:
    """Check names and extras only: running pip would change the environment of the tests."""
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib  # a dependency of pytest

    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert command[1] == "install", command
    for requirement in command[2:]:
        match = re.fullmatch(r"([\w-]+)(?:\[([\w,]+)\])?(?: @ \S+)?", requirement)
        assert match, requirement
        assert match[1] == project["name"], requirement
        assert shlex.join(command) == install_command(match[2]), "install lines come from hf_posenc.errors"
        extras = set(match[2].split(",")) if match[2] else set()
        assert extras <= set(project["optional-dependencies"]), requirement


def check_make(command: list[str]) -> None:
    """Check that the targets exist and have a line in `make help`; some of them run these tests."""
    targets = re.findall(r"^([\w-]+):.*##", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    assert set(command[1:]) <= set(targets), command


def check_harness(command: list[str]) -> None:
    """Check the options and that the model is a variant. The tasks are on the Hub; test_harness.py runs a local one."""
    arguments = command[command.index("--model_args") + 1].split(",")
    settings = dict(argument.split("=") for argument in arguments)
    assert Path(settings["pretrained"], "modeling_hf_posenc.py").exists(), "not a saved variant"
    assert settings.keys() == {"pretrained", "trust_remote_code", "max_length"}, command
    if find_spec("lm_eval") is not None:
        from lm_eval._cli import HarnessCLI

        sys.argv = command
        assert HarnessCLI().parse_args().model == "hf"


if __name__ == "__main__":
    run_page(Path(sys.argv[1]).read_text(encoding="utf-8"), "--shell" in sys.argv[2:])
