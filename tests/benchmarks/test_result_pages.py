"""The pages of benchmark results are current."""

from __future__ import annotations

import json

from benchmarks import __main__ as speed
from benchmarks import long_training
from benchmarks import report as speed_report
from benchmarks.extension import report as extension
from benchmarks.recovery import __main__ as recovery
from benchmarks.recovery import report as recovery_report


def test_the_benchmark_results_are_current() -> None:
    page = speed_report.render_page(json.loads(speed.RESULTS.read_text()))
    assert speed.PAGE.read_text() == page, "run `python -m benchmarks --report`"


def test_the_recovery_results_are_current() -> None:
    page = recovery_report.render_page(recovery.read_outcomes(), "recovery/")
    assert recovery.PAGE.read_text() == page, "run `python -m benchmarks.recovery --report`"


def test_the_extension_results_are_current() -> None:
    page = extension.render_page(json.loads(extension.RESULTS.read_text()))
    assert extension.PAGE.read_text() == page, "run `python -m benchmarks.extension --report`"


def test_the_results_of_long_training_are_current() -> None:
    results = json.loads(long_training.RESULTS.read_text())
    assert long_training.PAGE.read_text() == long_training.render_page(results), (
        "run `python -m benchmarks.long_training`"
    )
    first = next(iter(long_training.RUNS))
    without = long_training.quality_table({key: value for key, value in results.items() if not key.startswith(first)})
    assert without[0] == [first, "not yet run", "not yet run", "not yet run", "", ""]
