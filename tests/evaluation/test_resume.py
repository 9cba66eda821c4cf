"""Evaluations as they are run: resumed, refused, from the command line, in two processes."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import hf_posenc
from hf_posenc.cli import app
from hf_posenc.evaluation import run as run_module
from hf_posenc.evaluation import scoring
from hf_posenc.evaluation.halt import Halt
from tests.support import evaluation as evaluating
from tests.support import tiny_models as tiny
from tests.support.evaluation import text_ids, words

ROOT = Path(__file__).parents[2]


@pytest.fixture
def world(tmp_path: Path) -> dict[str, str]:
    """A stock model that ends, a variant that goes on, and a text."""
    (tmp_path / "text.txt").write_text(words(text_ids(600)))
    return {
        "stock": evaluating.checkpoint(tmp_path / "stock", "gpt2"),
        "alibi": evaluating.checkpoint(tmp_path / "alibi", "gpt2", "alibi"),
        "text": str(tmp_path / "text.txt"),
        "results": str(tmp_path / "out" / "results.json"),
    }


def counted(monkeypatch: pytest.MonkeyPatch) -> list[torch.Size]:
    """The shapes of all forwards from here on."""
    seen: list[torch.Size] = []
    real = scoring.states

    def states(model: Any, ids: torch.Tensor) -> torch.Tensor:
        seen.append(ids.shape)
        return real(model, ids)

    monkeypatch.setattr(scoring, "states", states)
    return seen


def measure(world: dict[str, str], **changes: Any) -> Any:
    settings = {"lengths": [12, 24, "2x"], "results": world["results"], "progress": False, **changes}
    return hf_posenc.evaluate([world["stock"], world["alibi"]], settings.pop("data", world["text"]), **settings)


def test_an_interrupted_run_goes_on_where_it_was(world: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    whole = measure(world, results=None)
    real, done = run_module.measure_length, []

    def cut_short(subject: Any, length: int, *rest: Any) -> Any:
        if len(done) == 4:
            raise KeyboardInterrupt
        done.append((subject.name, length))
        return real(subject, length, *rest)

    monkeypatch.setattr(run_module, "measure_length", cut_short)
    with pytest.raises(KeyboardInterrupt):
        measure(world)
    kept = json.loads(Path(world["results"]).read_text())["results"]
    assert [(one["model"], one["length"]) for one in kept["perplexity"]] == done
    monkeypatch.setattr(run_module, "measure_length", real)
    seen = counted(monkeypatch)
    again = measure(world)
    assert again == whole
    assert seen
    assert not [shape for shape in seen if shape[1] == 12]
    seen.clear()
    assert measure(world) == whole
    assert not seen
    longer = measure(world, lengths=[12, 30])  # more of the same may be asked for
    assert {shape[1] for shape in seen} == {30}
    assert longer.perplexity[0] == whole.perplexity[0]
    assert not list(Path(world["results"]).parent.glob("*.new"))


def test_another_request_is_refused(world: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    measure(world)
    with pytest.raises(ValueError, match=r"text was .*--restart"):
        measure(world, data=[words(text_ids(600, seed=1))])
    with pytest.raises(ValueError, match="stride was None and is 4"):
        measure(world, stride=4)
    with pytest.raises(ValueError, match="dtype was None and is 'bfloat16'"):
        measure(world, dtype="bfloat16")
    kept = Path(world["results"]).read_text()
    measure(world, trials=3, batch_tokens=50)  # what perplexity does not hang on
    assert Path(world["results"]).read_text() == kept
    evaluating.checkpoint(Path(world["alibi"]), "gpt2", "alibi", seed=1)
    with pytest.raises(ValueError, match="weights was"):
        measure(world)
    seen = counted(monkeypatch)
    measure(world, restart=True)
    assert seen
    Path(world["results"]).write_text("[]")
    with pytest.raises(ValueError, match="no results of an evaluation"):
        measure(world)


def test_a_lack_of_memory_is_not_for_ever(world: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    real = run_module.measure_length

    def no_room(subject: Any, length: int, *rest: Any) -> Any:
        if length == 24:
            raise Halt("out of memory", lasting=False)
        return real(subject, length, *rest)

    monkeypatch.setattr(run_module, "measure_length", no_room)
    first = measure(world)
    assert [one.length for one in first.perplexity if one.stop and one.stop.reason == "out of memory"] == [24, 24]
    monkeypatch.setattr(run_module, "measure_length", real)
    second = measure(world)
    assert [(one.model, one.length) for one in second.perplexity if one.stop] == [("stock", 96)]


def command(world: dict[str, str], *more: str) -> Any:
    line = ["eval", world["stock"], world["alibi"], "--data", world["text"], "--lengths", "0.5x,1x,2x", "--no-progress"]
    return CliRunner().invoke(app, [*line, *more])


def test_the_command_prints_and_writes(world: dict[str, str], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the extra `plots` is not installed")
    out = tmp_path / "written"
    out.mkdir()
    more = ["--measure", "all", "--trials", "2", "--depths", "0,1", "--blocks", "4,all", "--json"]
    done = command(world, *more, "--csv", str(out / "all.csv"), "--plots", str(out), "--results", world["results"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["models"] == ["stock", "alibi"]
    assert (found["trained_length"], found["comparable"]) == (48, True)
    assert [(one["model"], one["length"]) for one in found["against_first"]] == [("alibi", 24), ("alibi", 48)]
    stops = [one for one in found["perplexity"] if one["stop"]]
    assert [(one["model"], one["length"], one["stop"]["reaches"]) for one in stops] == [("stock", 96, 48)]
    for measure in ("perplexity", "passkey", "order", "similarity"):
        assert {(one["model"], one["length"]) for one in found[measure]} == {
            (model, length) for model in ("stock", "alibi") for length in (24, 48, 96)
        }
    with (out / "all.csv").open() as file:
        rows = list(csv.DictReader(file))
    one = next(row for row in rows if row["measure"] == "perplexity" and row["model"] == "alibi")
    assert float(one["value"]) == found["perplexity"][3]["perplexity"]["value"]
    assert [row["stopped"][:12] for row in rows if row["measure"] == "perplexity" and row["stopped"]] == [
        "the position"
    ]
    names = {"similarity", "length_curve", "positions", "passkey", "passkey_preference", "order"}
    assert {path.stem for path in out.glob("*.png")} == names
    table = command(world)
    assert table.exit_code == 0
    assert "ends at 48 [1]" in table.stdout
    assert "alibi / stock" in table.stdout


def test_figures_show_what_was_found(world: dict[str, str]) -> None:
    pytest.importorskip("matplotlib", reason="the extra `plots` is not installed")
    from hf_posenc.evaluation.figures import length_curve_figure, passkey_figure, position_figure
    from hf_posenc.plots.style import COLORS

    found = measure(world, measures=["perplexity", "passkey"], trials=2)
    lines = length_curve_figure(found).axes[0].lines
    drawn = {line.get_label(): line.get_xydata().tolist() for line in lines}
    assert drawn["alibi"] == [[one.length, one.perplexity.value] for one in found.perplexity if one.model == "alibi"]
    ends = "stock\n(ends at 48)"
    assert [place for place, _ in drawn[ends]] == [12, 24]
    assert [line.get_color() for line in lines if line.get_label() in (ends, "alibi")] == list(COLORS[:2])
    places = position_figure(found, 24).axes[0].lines
    assert places[0].get_ydata().tolist() == [part.perplexity.value for part in found.perplexity[1].positions]
    heat = passkey_figure(found, "preference").axes[1].images[0].get_array()
    assert heat.shape == (5, 3)
    assert heat[2, 1] == found.passkey[4].depths[2].preference.value
    with pytest.raises(ValueError, match="accuracy or preference"):
        passkey_figure(found, "rank")


def test_a_curve_for_the_model_card(world: dict[str, str]) -> None:
    line = ["eval", world["alibi"], "--data", world["text"], "--lengths", "12,24", "--no-progress"]
    done = CliRunner().invoke(app, [*line, "--write-curve", "--json"])
    assert done.exit_code == 0, done.output
    curve = json.loads((Path(world["alibi"]) / "length_curve.json").read_text())
    found = json.loads(done.stdout)["perplexity"]
    assert curve == [{"length": one["length"], "perplexity": one["perplexity"]["value"]} for one in found]


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--write-curve"], "beside one model"),
        (["--measure", "taste"], "there is no measure"),
        (["--lengths", "2y"], "is no length"),
        (["--dtype", "int3"], "no dtype"),
        (["--bf16", "--dtype", "float32"], "two things"),
        (["--blocks", "1"], "2 or more"),
        (["--depths", "a"], "no number"),
        (["--data", "/nowhere.txt"], "No data found"),
        (["--task", "taste"], "no task"),
        (["--confidence", "95"], "between 0 and 1"),
    ],
)
def test_what_cannot_be_met_exits_with_two(world: dict[str, str], more: list[str], said: str) -> None:
    done = command(world, *more)
    assert done.exit_code == 2, done.output
    assert said in done.output


def test_models_are_told_apart(world: dict[str, str], tmp_path: Path) -> None:
    settings = {"lengths": [12], "progress": False}
    two = [evaluating.checkpoint(tmp_path / name / "model", "gpt2") for name in ("a", "b")]
    assert hf_posenc.evaluate(two, world["text"], **settings).models == tuple(two)
    with pytest.raises(ValueError, match="need names"):
        hf_posenc.evaluate([two[0], two[0]], world["text"], **settings)
    with pytest.raises(ValueError, match="cannot be loaded"):
        hf_posenc.evaluate(str(tmp_path / "missing"), world["text"], **settings)
    with pytest.raises(ValueError, match="live model is measured in the dtype it has"):
        hf_posenc.evaluate(tiny.model("gpt2"), text_ids(100), dtype="bfloat16", **settings)
    with pytest.raises(ValueError, match="takes a tokenizer"):
        hf_posenc.evaluate(tiny.model("gpt2"), ["w5 w6"], **settings)
    with pytest.raises(ValueError, match="no setting"):
        hf_posenc.evaluate(two[0], world["text"], colour="red", **settings)
    line = ["eval", f"one={two[0]}", f"two={two[1]}", "--data", world["text"], "--lengths", "12", "--no-progress"]
    assert json.loads(CliRunner().invoke(app, [*line, "--json"]).stdout)["models"] == ["one", "two"]


def test_two_processes_find_what_one_does(world: dict[str, str]) -> None:
    """Rows of a batch are others, and sums of matrix products then round otherwise: equal to float32 rounding."""
    pytest.importorskip("accelerate", reason="the extra `train` is not installed")
    launch = ["-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--num_machines", "1"]
    launch += ["--main_process_port", "0", "--mixed_precision", "no", "--dynamo_backend", "no"]
    line = [world["stock"], world["alibi"], "--data", world["text"], "--lengths", "0.5x,2x", "--measure", "all"]
    line += ["--trials", "3", "--depths", "0,1", "--json", "--results", world["results"], "--batch-tokens", "100"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
    environment["ACCELERATE_USE_CPU"] = "true"  # the launcher of several GPUs, on CPUs
    done = subprocess.run(
        [sys.executable, *launch, "-m", "hf_posenc", "eval", *line],
        env=environment, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    two = json.loads(done.stdout)
    one = hf_posenc.evaluate(
        [world["stock"], world["alibi"]], world["text"], lengths=["0.5x", "2x"], batch_tokens=100, trials=3,
        depths=(0.0, 1.0), measures=["perplexity", "passkey", "order", "similarity"], progress=False,
    )  # fmt: skip
    assert two.pop("processes") == 2
    assert near({**two, "processes": 1}, json.loads(json.dumps(one.to_dict())))
    assert two["perplexity"][1]["stop"]["reaches"] == 48
    assert len(json.loads(Path(world["results"]).read_text())["results"]["perplexity"]) == 4


def near(found: Any, expected: Any) -> bool:
    """The same all the way down, but for the rounding of numbers."""
    if isinstance(expected, dict):
        return found.keys() == expected.keys() and all(near(found[key], expected[key]) for key in expected)
    if isinstance(expected, list):
        return len(found) == len(expected) and all(near(*pair) for pair in zip(found, expected, strict=True))
    return found == (pytest.approx(expected, rel=1e-4, abs=1e-5) if isinstance(expected, float) else expected)
