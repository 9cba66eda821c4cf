"""Settings and shared fixtures of the tests. They run offline."""

from __future__ import annotations

import os
from collections.abc import Generator

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # for subprocesses too: pytest-xdist runs one process per core

import pytest

from tests.support.processor import avoid_broken_amx

avoid_broken_amx()  # before torch is imported here or in a worker

from tests.support.hub_fixtures import hub, other, owner, server, third  # noqa: E402, F401
from tests.support.stock_fixtures import stock, text  # noqa: E402, F401


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """With HF_POSENC_NO_SKIPS, a skipped test fails: where all packages are installed, nothing may be left out."""
    report: pytest.TestReport = yield
    if report.skipped and not hasattr(report, "wasxfail") and os.environ.get("HF_POSENC_NO_SKIPS"):
        report.outcome, report.longrepr = "failed", f"skipped, which HF_POSENC_NO_SKIPS forbids: {report.longrepr}"
    return report


def pytest_collection_finish(session: pytest.Session) -> None:
    """Only where tests run: the process that starts pytest-xdist's workers need not import torch."""
    import torch

    torch.set_num_threads(1)  # pytest-xdist runs one process per core
