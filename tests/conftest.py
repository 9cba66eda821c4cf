"""Options and order of the test run. Nothing here reaches the network."""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
sys.path.insert(0, str(Path(__file__).parent))

import pytest
import torch
from hub_fixtures import hub, other, owner, server, third  # noqa: F401
from train_fixtures import stock, text  # noqa: F401

torch.set_num_threads(1)  # pytest-xdist runs one process a core


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="run the whole matrix, not a sample of its heavy part")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--full"):
        return
    left_out = [item for item in items if item.get_closest_marker("full")]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if not item.get_closest_marker("full")]
