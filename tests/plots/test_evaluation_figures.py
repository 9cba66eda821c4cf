"""Figures of evaluations."""

from __future__ import annotations

import math

import pytest

import hf_posenc
from hf_posenc.errors import PosEncError
from hf_posenc.evaluation import (
    Estimate,
    EvaluationReport,
    PasskeyResult,
    PerplexityResult,
    SimilarityResult,
    Stopped,
)
from tests.support import tiny_models as tiny
from tests.support.evaluation import random_ids

pytest.importorskip("matplotlib", reason="the extra `plots` is not installed")

from hf_posenc.plots.evaluation import length_curve_figure, passkey_figure, position_figure, similarity_figure
from hf_posenc.plots.style import COLORS


def test_figures_show_the_results() -> None:
    models = {"stock": tiny.model("gpt2"), "alibi": tiny.model("gpt2", "alibi")}
    report = hf_posenc.evaluate(
        models, random_ids(600), lengths=[12, 24, "2x"], metrics=["perplexity", "passkey"], passkey_trials=2,
        progress=False,
    )  # fmt: skip
    lines = length_curve_figure(report).axes[0].lines
    curves = {line.get_label(): line.get_xydata().tolist() for line in lines}
    assert curves["alibi"] == [[x.length, x.perplexity.value] for x in report.perplexity if x.model == "alibi"]
    stock_label = "stock\n(stops at 48)"
    assert [length for length, _ in curves[stock_label]] == [12, 24]
    assert [line.get_color() for line in lines if line.get_label() in (stock_label, "alibi")] == list(COLORS[:2])
    by_position = position_figure(report).axes[0].lines
    longest = report.perplexity[5]  # the only model that reaches 96 tokens
    assert (longest.model, longest.length) == ("alibi", 96)
    drawn = {line.get_label(): list(line.get_ydata()) for line in by_position}
    assert drawn["alibi"] == [bin_.perplexity.value for bin_ in longest.positions]
    heat = passkey_figure(report, "preference").axes[1].images[0].get_array()
    assert heat.shape == (5, 3)
    assert heat[2, 1] == report.passkey[4].depths[2].preference.value
    with pytest.raises(PosEncError, match="rank"):
        passkey_figure(report, "rank")


def test_without_a_trained_length_none_is_marked() -> None:
    result = PerplexityResult("a", 20, perplexity=Estimate(3.0, (2.0, 4.0)))
    for trained_length in (None, 10):
        figure = length_curve_figure(EvaluationReport(("a",), trained_length, 0.95, perplexity=(result,)))
        assert len(figure.axes[0].texts) == (trained_length is not None)


def test_legends_name_every_model_and_its_limit() -> None:
    names = tuple(f"model {number}" for number in range(12))
    estimates = [Estimate(math.exp(3 + number / 10), (15.0, 90.0)) for number in range(12)]
    results = [PerplexityResult(name, 48, perplexity=value) for name, value in zip(names, estimates, strict=True)]
    results.append(PerplexityResult(names[0], 96, Stopped("limit", 60)))
    cosine = Estimate(0.9, (0.8, 1.0))
    similarities = [SimilarityResult(name, 48, reference=names[0], cosine=cosine) for name in names]
    passkeys = (PasskeyResult(names[0], 96, Stopped("limit", 60)),)
    report = EvaluationReport(
        names, 48, 0.95, perplexity=tuple(results), similarity=tuple(similarities), passkey=passkeys
    )
    for figure in (length_curve_figure(report), similarity_figure(report)):
        labels = [text.get_text() for text in figure.legends[0].get_texts()]
        assert len(labels) == 12
        lines = [line for line in figure.axes[0].lines if line.get_label() in labels]
        assert len({(line.get_color(), line.get_linestyle(), line.get_marker()) for line in lines}) == 12
    assert length_curve_figure(report).legends[0].get_texts()[0].get_text() == "model 0\n(stops at 60)"
    assert "model 0" in similarity_figure(report).axes[0].get_ylabel()
    assert "stops at 60" in [text.get_text() for text in passkey_figure(report).axes[0].texts]
