"""`hf-posenc plot`: figures and numbers for schemes and checkpoints, and what it refuses."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner, Result

import hf_posenc
from hf_posenc import analysis
from hf_posenc.checkpoints import lock_output
from hf_posenc.cli import app
from tests.support.tiny_models import model


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["plot", *arguments])


@pytest.mark.parametrize(
    ("kind", "schemes"),
    [
        ("position-embeddings", ["sinusoidal"]),
        ("feature-ranges", ["sinusoidal", "polynomial"]),
        ("relative-buckets", ["t5", '{"type": "shaw", "max_distance": 4}']),
        ("bias-by-distance", ["alibi"]),
        ("bias-by-distance", ["alibi", "sandwich", '{"type": "kerple"}']),
        ("position-embeddings", ["sinusoidal", "polynomial"]),
        ("rotary-decay", ["rope", "xpos"]),
        ("separability", ["sinusoidal"]),
        ("token-clusters", ["sinusoidal"]),
    ],
)
def test_plots_of_schemes(tmp_path: Path, kind: str, schemes: list[str]) -> None:
    arguments = [kind, *(argument for scheme in schemes for argument in ("--scheme", scheme)), "--length", "24"]
    drawn = run(*arguments, "--out", str(tmp_path / "figure.svg"), "--json")
    assert drawn.exit_code == 0, drawn.output
    assert (tmp_path / "figure.svg").exists()
    output = json.loads(drawn.stdout)
    assert output["kind"] == kind
    assert [result["name"] for result in output["results"]] == schemes


def test_the_beginning_of_a_name_suffices(tmp_path: Path) -> None:
    line = ["plot", "bias", "--scheme", "alibi", "--scheme", "sandwich", "--json"]
    assert json.loads(CliRunner().invoke(app, line).stdout)["kind"] == "bias-by-distance"
    ambiguous = CliRunner().invoke(app, ["plot", "rotary", "--scheme", "rope", "--json"])
    assert ambiguous.exit_code == 2
    assert "one of rotary-decay, rotary-frequencies" in ambiguous.stderr


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A directory with a tiny GPT-2 and its tokenizer in stock/, and text.txt."""
    vocabulary = {f"w{number}": number for number in range(61)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w0").save_pretrained(tmp_path / "stock")
    model("gpt2", dtype=torch.float32).save_pretrained(tmp_path / "stock")
    (tmp_path / "text.txt").write_text(" ".join(f"w{number * 7 % 61}" for number in range(300)))
    return tmp_path


def test_attention_of_a_checkpoint(checkpoint: Path) -> None:
    stock, text, out = str(checkpoint / "stock"), str(checkpoint / "text.txt"), str(checkpoint / "figure.png")
    arguments = ["attention-by-distance", "--model", stock, "--data", text, "--length", "20", "--rows", "3"]
    compared = run(*arguments, "--scheme", "alibi", "--out", out, "--json")
    assert compared.exit_code == 0, compared.output
    before, after = json.loads(compared.stdout)["results"]
    assert (before["name"], after["name"]) == ("stock", "stock: alibi")
    input_ids = analysis.tokenize_file(stock, checkpoint / "text.txt", 20, 3)
    assert input_ids.shape == (3, 20)
    expected = analysis.attention_by_distance(analysis.load_model(stock), input_ids)
    assert torch.allclose(torch.tensor(before["share"], dtype=torch.float64), expected.share)
    hf_posenc.convert_checkpoint(stock, "rope", checkpoint / "variant")
    converted = run(*arguments, "--compare", str(checkpoint / "variant"), "--out", out)
    assert converted.exit_code == 0, converted.output
    assert "variant: mean attention distance" in converted.output


@pytest.mark.parametrize(("kind", "schemes"), [("attention", ["alibi", "rope", "t5"]), ("rotary-f", ["rope", "xpos"])])
def test_several_schemes_on_a_text(kind: str, schemes: list[str], checkpoint: Path) -> None:
    arguments = [kind, "--model", str(checkpoint / "stock"), "--data", str(checkpoint / "text.txt"), "--length", "20"]
    arguments += ["--rows", "2", "--out", str(checkpoint / "figure.png"), "--json"]
    given = [word for scheme in schemes for word in ("--scheme", scheme)]
    done = run(*arguments, *given)
    assert done.exit_code == 0, done.output
    names = [result["name"] for result in json.loads(done.stdout)["results"]]
    original = ["stock"] if kind == "attention" else []  # it has no rotation
    assert names == [*original, *(f"stock: {scheme}" for scheme in schemes)]
    too_many = run(*arguments, *["--scheme", "rope"] * 4)
    assert too_many.exit_code == 2
    assert "shows at most 4" in too_many.stderr


def test_embeddings_of_a_checkpoint(checkpoint: Path) -> None:
    stock, out = str(checkpoint / "stock"), str(checkpoint / "figure.png")
    drawn = run("position-embeddings", "--model", stock, "--out", out)
    assert "48 positions" in drawn.output, drawn.output  # the whole table, which is shorter than the default
    assert out in drawn.output.replace("\n", "")
    clusters = json.loads(run("token-clusters", "--model", stock, "--length", "5", "--json").stdout)["results"][0]
    assert clusters["labels"] == [f"w{token}" for token in clusters["tokens"]]


def test_models_without_rotation_are_skipped(checkpoint: Path) -> None:
    stock, text = str(checkpoint / "stock"), str(checkpoint / "text.txt")
    arguments = ["rotary-frequencies", "--model", stock, "--data", text, "--length", "20", "--rows", "2", "--json"]
    skipped = run(*arguments, "--scheme", "rope")
    assert skipped.exit_code == 0, skipped.output
    assert [len(result["wavelengths"]) for result in json.loads(skipped.stdout)["results"]] == [4]
    assert "skipped" in skipped.stderr
    assert run(*arguments).exit_code == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nothing", "--scheme", "rope", "--out", "x.png"], "rotary-decay"),
        (["rotary-decay", "--out", "x.png"], "--scheme"),
        (["rotary-decay", "--scheme", "rope"], "--out"),
        (["rotary-decay", "--scheme", "rope", "--out", "x.bmp"], ".png"),
        (["rotary-decay", "--scheme", "roppe", "--out", "x.png"], "did you mean"),
        (["attention-by-distance", "--scheme", "rope", "--out", "x.png"], "--data"),
        (["rotary-decay", "--scheme", "rope", "--compare", "x", "--out", "x.png"], "--model"),
        (
            ["bias-by-distance", *["--scheme", "alibi"] * 5, "--out", "x.png"],
            "--compare name 5 models to plot: bias-by-distance shows at most 4",
        ),
        (["token-clusters", "--scheme", "sinusoidal", "--scheme", "learned", "--out", "x.png"], "at most 1"),
        (["rotary-decay", "--scheme", "rope", "--length", "1", "--out", "x.png"], "--length"),
        (["position-embeddings", "--model", "nowhere", "--out", "x.png"], "nowhere"),
        (["rotary-decay", "--scheme", "rope", "--layer", "-1", "--out", "x.png"], "--layer"),
        (["rotary-decay", "--scheme", "rope", "--rows", "0", "--out", "x.png"], "--rows"),
        (["rotary-decay", "--scheme", "rope", "--rows", "9" * 9, "--out", "x.png"], "--rows"),
        (["token-clusters", "--scheme", "sinusoidal", "--length", "9" * 9, "--out", "x.png"], "--length"),
        (["token-clusters", "--scheme", "sinusoidal", "--length", "9" * 30, "--out", "x.png"], "--length"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_refusals(arguments: list[str], message: str) -> None:
    refused = run(*arguments)
    assert refused.exit_code == 2, refused.output
    assert message in refused.output


@pytest.mark.parametrize(
    "error", [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 TB")]
)
def test_too_little_memory(error: Exception, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As `relative-buckets --length 999999` needs, for a table of queries and keys."""

    def measure(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(analysis, "relative_buckets", measure)
    refused = run("relative-buckets", "--scheme", "t5", "--out", str(tmp_path / "x.png"))
    assert refused.exit_code == 2, refused.exception
    assert "Not enough memory for relative-buckets" in refused.output
    assert not list(tmp_path.iterdir())
    monkeypatch.setattr(analysis, "relative_buckets", lambda *_, **__: 1 / 0)
    assert run("relative-buckets", "--scheme", "t5", "--json").exit_code == 1


def test_one_command_at_a_time_writes_a_figure(tmp_path: Path) -> None:
    arguments = ["rotary-decay", "--scheme", "rope", "--length", "9", "--out", str(tmp_path / "x.png")]
    with lock_output(tmp_path / "x.png"):
        refused = run(*arguments)
        assert refused.exit_code == 2, refused.exception
        assert f"in use by process {os.getpid()}" in " ".join(refused.output.split())
        assert not (tmp_path / "x.png").exists()
    assert run(*arguments).exit_code == 0
    assert [path.name for path in tmp_path.iterdir()] == ["x.png"]


def test_without_matplotlib(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    arguments = ["rotary-decay", "--scheme", "rope", "--length", "9"]
    refused = run(*arguments, "--out", str(tmp_path / "x.png"))
    assert refused.exit_code == 2
    assert "hf_posenc[plots]" in refused.output
    assert run(*arguments, "--json").exit_code == 0
