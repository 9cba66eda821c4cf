"""`hf-posenc` as a whole: what every command has in common."""

from __future__ import annotations

import dataclasses
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import typer.main
from typer.testing import CliRunner

from hf_posenc.cli import app
from hf_posenc.cli.plot import KINDS
from tests.support.hostile_yaml import HOSTILE_YAML
from tests.support.sampling import some

COMMANDS = ("schemes", "convert", "export", "train", "eval", "plot", "push", "inspect", "enable", "disable")
WITHOUT_DEFAULT = {
    *("rotary_weights", "warm_start", "drift_text", "message", "config", "eval_data"),
    "text",
    *("results", "csv", "plots", "scheme", "model", "compare", "data", "out"),
}
"""Options that do nothing unless they are given."""


def plain(text: str) -> str:
    return re.sub(r"\x1b\[[\d;]*m", "", text)


def test_these_are_all_commands() -> None:
    assert {command.name or command.callback.__name__ for command in app.registered_commands} == set(COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_an_example_and_programs_get_json(command: str) -> None:
    done = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "200"})
    assert done.exit_code == 0
    assert re.search(rf"Example: .*(hf-posenc|hf_posenc) {command}\b", plain(done.output)), done.output
    assert "--json" in plain(done.output) or command in ("enable", "disable")
    wrong = CliRunner().invoke(app, [command, "--no-such-option"])
    assert wrong.exit_code == 2


@pytest.mark.parametrize("command", COMMANDS)
def test_help_shows_defaults_and_required_options(command: str) -> None:
    done = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "300"})
    lines = [line for line in plain(done.output).splitlines() if re.search(r"^│[ *]+--\w", line)]
    parameters = [item for item in typer.main.get_command(app).commands[command].params if item.name != "help"]
    options = {item.opts[0]: item for item in parameters if item.param_type_name == "option"}
    for name, option in options.items():
        line = next(line for line in lines if re.search(rf"{name}\s", line))
        is_flag = option.is_flag and not option.secondary_opts
        expected = "[required]" if option.required else "[default: "
        assert is_flag or option.name in WITHOUT_DEFAULT or expected in line, line


def test_help_of_plot_says_what_each_kind_needs() -> None:
    text = " ".join(plain(CliRunner().invoke(app, ["plot", "--help"], env={"COLUMNS": "2000"}).output).split())
    assert "Give --scheme or --model, and --out or --json." in text
    for name, kind in KINDS.items():
        shown = "one model" if kind.max_models == 1 else f"at most {kind.max_models}"
        assert f"{name}: {kind.help} ({shown}{'; needs --model and --data' * kind.on_text})" in text
    without_original = [name for name, kind in KINDS.items() if not kind.with_original or kind.max_models == 1]
    named = text.split("one of the models; ")[1].split(" show that of --scheme only")[0]
    assert sorted(named.replace(" and ", ", ").split(", ")) == sorted(without_original)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_fits_80_columns(command: str) -> None:
    """Rich cuts the names of options that do not fit."""
    help_text = plain(CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "80"}).output)
    assert "…" not in help_text, help_text


@pytest.mark.slow
def test_help_and_version_do_not_import_torch() -> None:
    for option in ("--version", "--help"):
        code = f"import sys; from hf_posenc.cli import app; app([{option!r}], standalone_mode=False); "
        done = subprocess.run([sys.executable, "-c", code + "assert 'torch' not in sys.modules"], capture_output=True)
        assert done.returncode == 0, done.stderr


def test_shown_defaults_of_train_are_those_of_a_request() -> None:
    from hf_posenc.training import TrainRequest

    fields = {field.name: field.default for field in dataclasses.fields(TrainRequest)}
    shown = {item.name: item.show_default for item in typer.main.get_command(app).commands["train"].params}
    checked = [name for name in fields if isinstance(fields[name], (str, int, float)) and isinstance(shown[name], str)]
    assert len(checked) >= 6
    for name in checked:
        assert shown[name] == str(fields[name])


def test_the_module_is_the_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["hf-posenc", "schemes", "--json"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("hf_posenc", run_name="__main__", alter_sys=False)
    assert ended.value.code == 0
    assert capsys.readouterr().out == CliRunner().invoke(app, ["schemes", "--json"]).output


@some(
    "name",
    sorted(set(HOSTILE_YAML) - {"a key that is no string", "reserved name"}),
    fast=["aliases", "deep lists", "code"],
)
def test_hostile_config_file(name: str, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(HOSTILE_YAML[name])
    done = CliRunner().invoke(app, ["train", "--config", str(tmp_path / "run.yaml")])
    assert done.exit_code == 2, (done.output, done.exception)
    assert done.stderr.startswith("error: --config")
    assert len(done.stderr) < 1500


def test_config_file_that_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_bytes(b"\xff\xfe\x80")
    for path in (tmp_path / "run.yaml", tmp_path, tmp_path / "nowhere", Path("/dev/zero")):
        done = CliRunner().invoke(app, ["train", "--config", str(path)])
        assert done.exit_code == 2, (done.output, done.exception)
        assert done.stderr.startswith("error: ")
