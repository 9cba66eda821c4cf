"""Estimates, confidence intervals and the JSON form of results."""

from __future__ import annotations

import dataclasses
import json
import pickle

import pytest
import torch

from hf_posenc.evaluation.results import (
    DepthResult,
    Estimate,
    EvaluationStopped,
    PasskeyResult,
    PerplexityResult,
    PositionResult,
    Stopped,
    from_json,
    mean_estimate,
    proportion_estimate,
    student_t_quantile,
)


def test_student_t_quantiles_match_the_tables() -> None:
    expected = {1: 12.7062, 2: 4.30265, 3: 3.18245, 4: 2.77645, 7: 2.36462, 10: 2.22814, 30: 2.04227, 120: 1.97993}
    for degrees_of_freedom, quantile in expected.items():
        assert student_t_quantile(0.975, degrees_of_freedom) == pytest.approx(quantile, rel=1e-5)
    assert student_t_quantile(0.95, 5) == pytest.approx(2.01505, rel=1e-5)
    assert student_t_quantile(0.975, 100_000) == pytest.approx(1.95999, rel=1e-5)


def test_mean_is_weighted_and_has_the_textbook_interval() -> None:
    values = torch.tensor([1.0, 2.0, 4.0, 5.0])
    estimate = mean_estimate(values * 10, torch.full((4,), 10), 0.95)
    margin = student_t_quantile(0.975, 3) * values.std().item() / 2
    assert estimate.value == pytest.approx(3)
    assert estimate.confidence_interval == pytest.approx((3 - margin, 3 + margin))
    assert mean_estimate(torch.tensor([2.0, 30.0]), torch.tensor([1, 3]), 0.9).value == pytest.approx(8)
    assert mean_estimate(torch.tensor([2.0]), torch.tensor([1]), 0.9) == Estimate(2.0)
    with pytest.raises(AssertionError, match="no segments"):
        mean_estimate(torch.zeros(3), torch.zeros(3), 0.9)


@pytest.mark.parametrize("num_segments", [3, 12])
def test_intervals_contain_the_true_mean_as_often_as_they_claim(num_segments: int) -> None:
    generator = torch.Generator().manual_seed(0)
    counts = torch.randint(50, 60, (2000, num_segments), generator=generator)
    losses = 3 + torch.randn(2000, num_segments, generator=generator)
    for confidence in (0.5, 0.95):
        estimates = [mean_estimate(loss * count, count, confidence) for loss, count in zip(losses, counts, strict=True)]
        intervals = [estimate.confidence_interval for estimate in estimates]
        coverage = sum(low < 3 < high for low, high in intervals) / 2000
        assert coverage == pytest.approx(confidence, abs=0.04)  # three standard errors of 2,000 trials


def test_proportions_of_all_and_none() -> None:
    none, every = proportion_estimate(0, 10, 0.95), proportion_estimate(10, 10, 0.95)
    assert none.value == 0
    assert none.confidence_interval == pytest.approx((0, 0.27753), abs=1e-4)
    assert every.value == 1
    assert every.confidence_interval == pytest.approx((0.72247, 1), abs=1e-4)


@pytest.mark.parametrize(
    "result",
    [
        PerplexityResult("a", 8, Stopped("too long", 4)),
        PerplexityResult(
            "a", 8, None, Estimate(2.0, (1.0, 3.0)), 7, 1, (PositionResult(0, 8, Estimate(2.0), 7),), (5.0,), (7,)
        ),
        PasskeyResult("a", 8, None, (DepthResult(0.5, 3, Estimate(1.0, (0.5, 1.0)), Estimate(1.0), 1.0, -0.1),)),
    ],
)
def test_results_survive_json(result: PerplexityResult | PasskeyResult) -> None:
    assert from_json(type(result), json.loads(json.dumps(dataclasses.asdict(result)))) == result


def test_a_stop_reaches_other_processes_whole() -> None:
    stopped = pickle.loads(pickle.dumps(EvaluationStopped("out of memory", permanent=False)))
    assert (stopped.reason, stopped.permanent, stopped.refused) == ("out of memory", False, False)
    assert "out of memory" in str(stopped)
