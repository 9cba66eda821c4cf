"""Settings and shared fixtures of the tests. They run offline."""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # for subprocesses too: pytest-xdist runs one process per core

import pytest

from tests.support.processor import avoid_broken_amx

avoid_broken_amx()  # before torch is imported here or in a worker

from tests.support.hub_fixtures import hub, other, owner, server, third  # noqa: E402, F401
from tests.support.stock_fixtures import stock, text  # noqa: E402, F401


def pytest_collection_finish(session: pytest.Session) -> None:
    """Only where tests run: the process that starts pytest-xdist's workers need not import torch."""
    import torch

    torch.set_num_threads(1)  # pytest-xdist runs one process per core
