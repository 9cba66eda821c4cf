"""Reports: comparison of models, tables, CSV and JSON."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

import hf_posenc
from hf_posenc.errors import PosEncError
from hf_posenc.evaluation import Estimate, EvaluationReport, PasskeyResult, PerplexityResult, SimilarityResult, Stopped
from hf_posenc.evaluation.results import DepthResult
from tests.support import tiny_models as tiny
from tests.support.evaluation import random_ids


def last_column(line: str) -> str:
    return line.split("|")[-2].strip()


def test_relative_perplexity_compares_segment_by_segment() -> None:
    models = {"a": tiny.model("llama"), "b": tiny.model("llama", "alibi")}
    report = hf_posenc.evaluate(models, random_ids(400), lengths=[20, 40], progress=False)
    ratios = report.relative_perplexity()
    assert set(ratios) == {("b", 20), ("b", 40)}
    values = {(result.model, result.length): result.perplexity.value for result in report.perplexity}
    for (_, length), ratio in ratios.items():
        assert ratio.value == pytest.approx(values["b", length] / values["a", length])
    same = hf_posenc.evaluate({"a": models["a"], "b": models["a"]}, random_ids(400), lengths=[20], progress=False)
    assert same.relative_perplexity()["b", 20] == Estimate(1.0, (1.0, 1.0))
    assert same.is_comparable()


def test_different_tokens_are_not_compared() -> None:
    estimate = Estimate(2.0)
    results = [PerplexityResult(name, 8, perplexity=estimate, text_hash=name) for name in ("a", "b")]
    report = EvaluationReport(("a", "b"), 8, 0.95, perplexity=tuple(results))
    assert not report.is_comparable()
    assert not report.relative_perplexity()
    assert "not comparable" in str(report)


def test_rank_over_all_depths_is_a_geometric_mean() -> None:
    half = Estimate(0.5, (0.2, 0.8))
    cells = tuple(DepthResult(depth, 4, half, half, rank, -1.0) for depth, rank in ((0.0, 1.0), (1.0, 100.0)))
    report = EvaluationReport(("a",), 48, 0.95, passkey=(PasskeyResult("a", 48, depths=cells),))
    assert last_column(str(report).splitlines()[-1]) == "10.0"


def test_each_limit_is_explained_once() -> None:
    stops = (Stopped("limit (96)", 48), Stopped("limit (192)", 48), Stopped("no text"), Stopped("no text"))
    results = tuple(PerplexityResult("a", 96 + index, stopped) for index, stopped in enumerate(stops))
    lines = str(EvaluationReport(("a",), 48, 0.95, perplexity=results)).splitlines()
    cells = [last_column(line) for line in lines if line.startswith("|")]
    assert cells[2:] == ["stops at 48 [1]"] * 2 + ["not measured [2]"] * 2
    assert [line for line in lines if line.startswith("[")] == ["[1] a: limit (96)", "[2] a: no text"]


def test_reports_are_saved(tmp_path: Path) -> None:
    report = hf_posenc.evaluate(tiny.model("gpt2"), random_ids(100), lengths=[20, 96], progress=False)
    report.save_csv(tmp_path / "new" / "eval.csv")
    report.save_json(tmp_path / "newer" / "eval.json")
    saved = json.loads((tmp_path / "newer" / "eval.json").read_text())
    assert saved == json.loads(json.dumps(report.to_dict()))
    rows = list(csv.DictReader((tmp_path / "new" / "eval.csv").open()))
    overall = [row for row in rows if row["quantity"] == "perplexity" and not row["breakdown"]]
    low, high = report.perplexity[0].perplexity.confidence_interval
    assert [(row["model"], row["length"]) for row in overall] == [("GPT2LMHeadModel", "20")]
    assert [float(overall[0][name]) for name in ("value", "low", "high")] == [
        report.perplexity[0].perplexity.value,
        low,
        high,
    ]
    assert [row["length"] for row in rows if row["stopped"]] == ["96"]
    assert sum(row["breakdown"] != "" for row in rows) == len(report.perplexity[0].positions)


def test_a_length_curve_needs_a_model_and_a_directory(tmp_path: Path) -> None:
    results = (
        PerplexityResult("a", 8, perplexity=Estimate(2.0)),
        PerplexityResult("a", 16, Stopped("limit", 8)),
        PerplexityResult("b", 8, perplexity=Estimate(3.0)),
    )
    report = EvaluationReport(("a", "b"), 8, 0.95, perplexity=results)
    with pytest.raises(PosEncError, match="'a', 'b'"):
        report.save_length_curve(tmp_path)
    with pytest.raises(PosEncError, match="not a directory"):
        report.save_length_curve(tmp_path / "missing", "a")
    path = report.save_length_curve(tmp_path, "a")
    assert json.loads(path.read_text()) == [{"length": 8, "perplexity": 2.0}]


@pytest.mark.parametrize("name_length", [4, 22])
def test_tables_of_six_models_fit_a_terminal(name_length: int) -> None:
    names = tuple(f"model-{index}".ljust(name_length, "x") for index in range(6))
    estimate, lengths = Estimate(123.4, (120.1, 127.9)), (512, 1024, 2048, 4096)
    shared = {"perplexity": estimate, "text_hash": "same", "segment_tokens": (5, 5), "segment_losses": (9.0, 8.0)}
    results = tuple(PerplexityResult(name, length, **shared) for name in names for length in lengths)
    cells = tuple(DepthResult(depth / 8, 4, estimate, estimate, 3.0, -1.0) for depth in range(9))
    passkeys = tuple(PasskeyResult(name, length, depths=cells) for name in names for length in lengths)
    text = str(EvaluationReport(names, 1024, 0.95, perplexity=results, passkey=passkeys))
    assert max(map(len, text.splitlines())) <= 100
    assert text.count("123.4 (120.1 to 127.9)") == len(results)
    assert f"Perplexity divided by that of {names[0]}" in text
    assert text.count("1 (1 to 1)") == 5 * len(lengths)
    for depth in range(9):
        assert f"depth {depth / 8:.0%}" in text


def test_long_names_of_six_models_are_numbered() -> None:
    names = tuple(f"model-{index}".ljust(63, "x") for index in range(6))
    estimate, lengths = Estimate(123.4, (120.1, 127.9)), (512, 1024, 2048, 4096)
    shared = {"perplexity": estimate, "text_hash": "same", "segment_tokens": (5, 5), "segment_losses": (9.0, 8.0)}
    results = [PerplexityResult(name, length, **shared) for name in names for length in lengths]
    results[-1] = PerplexityResult(names[5], 4096, Stopped("limit (2048)", 2048))
    cells = tuple(DepthResult(depth / 8, 4, estimate, estimate, 3.0, -1.0) for depth in range(9))
    others = {
        "passkey": tuple(PasskeyResult(name, 512, depths=cells) for name in names),
        "similarity": tuple(SimilarityResult(name, 512, reference="r" * 63, cosine=estimate) for name in names),
    }
    report = EvaluationReport(names, 1024, 0.95, perplexity=tuple(results), **others)
    lines = str(report).splitlines()
    assert max(map(len, lines)) <= 100
    for number, name in enumerate((*names, "r" * 63), 1):
        assert f"model {number}: {name}" in lines
    assert "[1] model 6: limit (2048)" in lines
    assert sum(line.count("123.4 (120.1 to 127.9)") for line in lines) == 23 + 6
    assert report.to_dict()["models"] == names, "only tables have numbers"


def test_a_narrow_table_stays_in_one_piece() -> None:
    estimate = Estimate(2.0)
    shared = {"perplexity": estimate, "text_hash": "same", "segment_tokens": (5,), "segment_losses": (9.0,)}
    results = tuple(PerplexityResult(name, 8, **shared) for name in ("a", "b"))
    lines = str(EvaluationReport(("a", "b"), 8, 0.95, perplexity=results)).splitlines()
    assert [cell.strip() for cell in lines[2].split("|")[1:-1]] == ["length", "a", "b", "b / a"]
    assert len([line for line in lines if line.startswith("|")]) == 3
