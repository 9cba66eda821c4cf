"""Errors on the command line name the flag that they are about, and long waits say what they are for."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

import hf_posenc
from hf_posenc.cli import app, messages
from hf_posenc.cli.messages import name_flags
from tests.support import word_level_tokenizer as word_level

FLAGS = {"max_length": "--max-length", "layer": "--layer", "data": "--data", "scheme": "--scheme"}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("files")
    word_level.saved("gpt2", directory / "stock")
    hf_posenc.convert_checkpoint(directory / "stock", "learned", directory / "variant")
    (directory / "text.txt").write_text(word_level.text(200))
    (directory / "full").mkdir()
    (directory / "full" / "notes.txt").write_text("mine")
    return directory


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("max_length must be between 1 and 16", "--max-length must be between 1 and 16"),
        ("max_length=9 is longer than 8", "--max-length 9 is longer than 8"),
        ("layer 3 does not exist", "--layer 3 does not exist"),
        ("Unknown scheme 'x'", "Unknown --scheme 'x'"),
        ("alibi has no layer 3", "alibi has no layer 3"),
        ("the scheme is new", "the scheme is new"),
        ("cannot read my_max_length/max_length.txt", "cannot read my_max_length/max_length.txt"),
        ("--max-length and max_length are the same", "--max-length and max_length are the same"),
        ("nothing at some.txt", "--data: nothing at some.txt"),
        ("nothing at some.txt-2", "nothing at some.txt-2"),
        ("alibi: unknown option 'foo'", "alibi: unknown option 'foo'"),
    ],
)
def test_arguments_become_flags(message: str, expected: str) -> None:
    assert name_flags(message, FLAGS, {"data": "some.txt"}) == expected


def test_a_value_that_two_options_have_names_neither() -> None:
    assert name_flags("no file a.txt", FLAGS, {"data": "a.txt", "scheme": "a.txt"}) == "no file a.txt"


def test_errors_in_a_scheme_name_its_flag() -> None:
    given = {"scheme": "[]"}
    assert name_flags("alibi: unknown option 'foo'", FLAGS, given) == "--scheme: alibi: unknown option 'foo'"
    assert name_flags("notes: unknown option 'foo'", FLAGS, given) == "notes: unknown option 'foo'"
    assert name_flags("learned: max_length=9 is too long", FLAGS, given) == "learned: --max-length 9 is too long"


EVAL = "eval {stock} --data {text}"
CONVERT = "convert {stock} --out {new}"
ERRORS = {
    f"{EVAL} --stride 0": "--stride",
    f"{EVAL} --confidence 2": "--confidence",
    f"{EVAL} --position-bins 0": "--position-bins",
    f"{EVAL} --passkey-trials 0": "--passkey-trials",
    f"{EVAL} --passkey-depths 3": "--passkey-depths",
    f"{EVAL} --shuffle-blocks 1": "--shuffle-blocks",
    f"{EVAL} --max-tokens 0": "--max-tokens",
    f"{EVAL} --batch-tokens 0": "--batch-tokens",
    f"{EVAL} --mlm-probability 1": "--mlm-probability",
    f"{EVAL} --trained-length 0": "--trained-length",
    f"{EVAL} --metrics wishes": "--metrics",
    f"{EVAL} --dtype int3": "--dtype",
    f"{EVAL} --task knitting": "--task",
    f"{EVAL} --device toaster": "--device",
    f"{EVAL} --lengths 8,0.5y": "--lengths",
    f"{EVAL} --lengths 1": "--lengths",
    f"{EVAL} --results {{full}}": "--results",
    "eval {stock} --data nowhere.txt": "--data",
    f"{CONVERT} --scheme wishes": "--scheme",
    f"{CONVERT} --scheme {{{{": "--scheme",
    f'{CONVERT} --scheme {{{{"type":"alibi","foo":1}}}}': "--scheme: alibi: unknown option 'foo'",
    f'{CONVERT} --scheme {{{{"type":"rope","theta":-1}}}}': "--scheme: rope: theta",
    f'{CONVERT} --scheme {{{{"type":"alibi","layers":[9]}}}}': "--scheme: alibi: layers",
    f'{CONVERT} --scheme {{{{"type":"learned","layers":[0]}}}}': "--scheme: learned acts at the input",
    f'{CONVERT} --scheme {{{{"theta":1}}}}': "--scheme: position_scheme: ",
    f"{CONVERT} --scheme []": "--scheme: position_scheme is an empty list",
    f"{CONVERT} --scheme [3]": "--scheme: position_scheme must be",
    'plot bias --scheme {{"type":"t5","foo":1}} --out {new}.png': "--scheme: t5: unknown option 'foo'",
    f"{CONVERT} --scheme rope --rotary-weights sideways": "--rotary-weights",
    f"{CONVERT} --scheme learned --max-length 4096": "--max-length",
    f"{CONVERT} --scheme alibi --drift-text nowhere.txt": "--drift-text",
    f"{CONVERT} --scheme alibi --warm-start nowhere.txt": "--warm-start",
    "convert {stock} --scheme alibi --out {full}": "--force",
    "export {variant} --out {new} --max-positions 4096": "--max-positions",
    "plot bias-by-distance --scheme wishes --out {new}.png": "--scheme",
    "plot bias-by-distance --scheme alibi --out {new}.gif": "--out",
    "plot bias-by-distance --scheme alibi --out {new}.png --hidden-size 7": "--hidden-size",
    "plot bias-by-distance --model {stock} --layer 9 --out {new}.png": "--layer",
    "plot attention-by-distance --model {stock} --data nowhere.txt --out {new}.png": "--data",
    "train --model {stock} --scheme wishes --data {text} --train-length 8 --output-dir {new}": "--scheme",
    "train --model {stock} --scheme alibi --data {text} --train-length x --output-dir {new}": "--train-length",
    "train --model {stock} --scheme alibi --data nowhere.txt --train-length 8 --output-dir {new}": "--data",
}


@pytest.mark.parametrize("line", ERRORS)
def test_errors_name_the_flag(line: str, files: Path, tmp_path: Path) -> None:
    names = {"stock": files / "stock", "text": files / "text.txt", "full": files / "full", "new": tmp_path / "new"}
    names["variant"] = files / "variant"
    arguments = [word.format(**names) for word in line.split()]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 2, done.output
    error = done.stderr.split("error: ", 1)[1]
    assert ERRORS[line] in error, error


def test_a_push_names_its_flag(files: Path, tmp_path: Path) -> None:
    assert CliRunner().invoke(app, ["convert", str(files / "stock"), "--scheme", "alibi", "--out", str(tmp_path / "a")])
    done = CliRunner().invoke(app, ["push", str(tmp_path / "a"), "me/a", "--base-model", "not a hub id"])
    assert (done.exit_code, "--base-model must be a Hub id" in done.stderr) == (2, True), done.stderr


@pytest.mark.parametrize("command", ["convert", "inspect"])
def test_a_long_wait_is_announced(command: str, files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = ["--scheme", "alibi", "--out", str(tmp_path / "out"), "--json"] if command == "convert" else ["--json"]
    for patience, announced in ((1e-6, True), (300.0, False)):
        monkeypatch.setattr(messages, "PATIENCE", patience)
        done = CliRunner().invoke(app, [command, str(files / "stock"), *options, *(["--force"] * (len(options) > 1))])
        assert done.exit_code == 0, done.output
        assert ("ing " + str(files / "stock") + " ..." in done.stderr) is announced
        json.loads(done.stdout)


def test_a_wait_that_ended_is_not_announced(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(messages, "PATIENCE", 0.05)
    with pytest.raises(KeyError), messages.announce_wait("Failing"):
        raise KeyError
    time.sleep(0.1)
    assert capsys.readouterr().err == ""
