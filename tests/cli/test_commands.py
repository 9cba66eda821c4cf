"""`hf-posenc` as a whole: what every command has in common."""

from __future__ import annotations

import re
import runpy
import sys

import pytest
from typer.testing import CliRunner

from hf_posenc.cli import app

COMMANDS = ("schemes", "convert", "train", "eval", "plot", "push", "inspect")


def plain(text: str) -> str:
    return re.sub(r"\x1b\[[\d;]*m", "", text)


def test_these_are_all_commands() -> None:
    assert {command.name or command.callback.__name__ for command in app.registered_commands} == set(COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_an_example_and_programs_get_json(command: str) -> None:
    done = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "200"})
    assert done.exit_code == 0
    assert re.search(rf"Example: .*(hf-posenc|hf_posenc) {command}\b", plain(done.output)), done.output
    assert "--json" in plain(done.output)
    wrong = CliRunner().invoke(app, [command, "--no-such-option"])
    assert wrong.exit_code == 2


def test_the_module_is_the_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["hf-posenc", "schemes", "--json"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("hf_posenc", run_name="__main__", alter_sys=False)
    assert ended.value.code == 0
    assert capsys.readouterr().out == CliRunner().invoke(app, ["schemes", "--json"]).output
