"""The pages of benchmark results are current."""

from __future__ import annotations

import json

from benchmarks import __main__ as speed
from benchmarks import extension
from benchmarks import report as speed_report
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
    assert extension.PAGE.read_text() == page, "run `python -m benchmarks.extension`"
