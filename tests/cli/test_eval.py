"""The command `hf-posenc eval`."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
from click.testing import Result
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from hf_posenc.cli import app
from hf_posenc.evaluation import run as run_module
from tests.support.evaluation import random_ids, save_checkpoint, to_text
from tests.support.sampling import combinations


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    """A stock GPT-2 with a limit of 48 tokens, a variant without a limit, and a text."""
    (tmp_path / "text.txt").write_text(to_text(random_ids(600)))
    save_checkpoint(tmp_path / "stock", "gpt2")
    save_checkpoint(tmp_path / "alibi", "gpt2", "alibi")
    return tmp_path


def run_command(workspace: Path, models: list[str], *options: str) -> Result:
    data = ["--data", str(workspace / "text.txt"), "--lengths", "0.5x,1x,2x", "--no-progress"]
    return CliRunner().invoke(app, ["eval", *models, *data, *options])


def both(workspace: Path) -> list[str]:
    return [str(workspace / name) for name in ("stock", "alibi")]


def test_eval_prints_tables_and_writes_files(workspace: Path) -> None:
    pytest.importorskip("matplotlib", reason="the extra `plots` is not installed")
    out = workspace / "out"
    options = ["--metrics", "all", "--passkey-trials", "2", "--passkey-depths", "0,1", "--shuffle-blocks", "4,all"]
    files = ["--csv", str(out / "all.csv"), "--plots", str(out), "--results", str(out / "results.json")]
    completed = run_command(workspace, both(workspace), *options, *files, "--json")
    assert completed.exit_code == 0, completed.output
    report = json.loads(completed.stdout)
    assert report["models"] == ["stock", "alibi"]
    assert (report["trained_length"], report["comparable"]) == (48, True)
    ratios = [(ratio["model"], ratio["length"]) for ratio in report["relative_perplexity"]]
    assert ratios == [("alibi", 24), ("alibi", 48)]
    stopped = [result for result in report["perplexity"] if result["stopped"]]
    limits = [(result["model"], result["length"], result["stopped"]["max_length"]) for result in stopped]
    assert limits == [("stock", 96, 48)]
    for metric in ("perplexity", "passkey", "order", "similarity"):
        assert {(result["model"], result["length"]) for result in report[metric]} == {
            (model, length) for model in ("stock", "alibi") for length in (24, 48, 96)
        }
    with (out / "all.csv").open() as file:
        rows = list(csv.DictReader(file))
    first = next(row for row in rows if row["quantity"] == "perplexity" and row["model"] == "alibi")
    assert float(first["value"]) == report["perplexity"][3]["perplexity"]["value"]
    names = {"similarity", "length_curve", "positions", "passkey", "passkey_preference", "order"}
    assert {path.stem for path in out.glob("*.png")} == names
    table = run_command(workspace, both(workspace), "--results", str(out / "results.json"))
    assert table.exit_code == 0
    assert "stops at 48 [1]" in table.stdout
    assert "alibi / stock" in table.stdout


def test_eval_writes_the_length_curve_for_the_model_card(workspace: Path) -> None:
    completed = run_command(workspace, [str(workspace / "alibi")], "--save-length-curve", "--json")
    assert completed.exit_code == 0, completed.output
    curve = json.loads((workspace / "alibi" / "length_curve.json").read_text())
    results = json.loads(completed.stdout)["perplexity"]
    assert curve == [{"length": result["length"], "perplexity": result["perplexity"]["value"]} for result in results]


def test_models_can_be_named(workspace: Path) -> None:
    stock, alibi = both(workspace)
    completed = run_command(workspace, [f"first={stock}", alibi], "--lengths", "12", "--json")
    assert completed.exit_code == 0, completed.output
    assert json.loads(completed.stdout)["models"] == ["first", "alibi"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--save-length-curve"], "--save-length-curve"),
        (["--metrics", "speed"], "speed"),
        (["--lengths", "2y"], "2y"),
        (["--dtype", "int3"], "int3"),
        (["--shuffle-blocks", "1"], "--shuffle-blocks"),
        (["--passkey-depths", "a"], "'a'"),
        (["--data", "/nowhere.txt"], "/nowhere.txt"),
        (["--data", "BINARY"], "UTF-8"),
        (["--task", "dance"], "dance"),
        (["--task", "masked-lm"], "masked-lm"),
        (["--confidence", "95"], "confidence"),
        (["--csv", "DIRECTORY"], "Cannot write"),
        (["--plots", "FILE"], "Cannot write"),
        (["--results", "DIRECTORY"], "is a directory"),
        (["--device", "abacus"], "abacus"),
    ],
    ids=" ".join,
)
def test_invalid_options_exit_with_2_before_evaluating(
    workspace: Path, monkeypatch: pytest.MonkeyPatch, options: list[str], message: str
) -> None:
    monkeypatch.setattr(run_module, "_evaluate_or_resume", lambda *_: pytest.fail("it should not evaluate anything"))
    (workspace / "binary.txt").write_bytes(b"\xff\xfe\x80")
    paths = {"DIRECTORY": workspace, "FILE": workspace / "text.txt", "BINARY": workspace / "binary.txt"}
    completed = run_command(workspace, both(workspace), *(str(paths.get(option, option)) for option in options))
    assert completed.exit_code == 2, (completed.output, completed.exception)
    assert message in completed.output
    assert len(completed.output) < 1200


@combinations(value=["nan", "inf"], name=["transformer.ln_f.weight", "transformer.wte.weight"])
def test_json_never_contains_nan(workspace: Path, name: str, value: str) -> None:
    path = workspace / "alibi" / "model.safetensors"
    tensors = load_file(path)
    tensors[name].view(-1)[-1] = float(value)
    save_file(tensors, path, metadata={"format": "pt"})
    metrics = ["--metrics", "all", "--passkey-trials", "2", "--passkey-depths", "0"]
    completed = run_command(workspace, both(workspace), *metrics, "--json", "--csv", str(workspace / "out.csv"))
    assert completed.exit_code == 0, (completed.output, completed.exception)

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    report = json.loads(completed.stdout, parse_constant=refuse)
    assert any(result["stopped"] for result in report["similarity"] if result["model"] == "alibi")
    with (workspace / "out.csv").open() as file:
        values = {row[column] for row in csv.DictReader(file) for column in ("value", "low", "high")}
    assert not values & {"nan", "inf", "-inf"}
