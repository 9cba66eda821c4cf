"""A pytest plugin for transformers' model tests: gives the tiny models of the tests a position scheme.

The tests stay as they are. A model tester makes the config of each test, and a stock class that is built with a
variant's config builds the variant; so the plugin changes the configs only. It seeds every test, and writes one line
of JSON per test: its outcome, the reason if it did not pass, and how many models were built with and without a scheme.
"""

from __future__ import annotations

import collections
import functools
import json
import os
import random
import re
import unittest
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import transformers.testing_utils
from transformers import PreTrainedModel

import hf_posenc  # noqa: F401

SCHEME: Any = json.loads(os.environ["POSENC_UPSTREAM_SCHEME"])
"""None for stock models."""
RESULTS = Path(os.environ["POSENC_UPSTREAM_RESULTS"])
INITIALIZER_RANGE = float(os.environ["POSENC_UPSTREAM_INIT"])
ONLY, LEFT_OUT = (re.compile(os.environ[f"POSENC_UPSTREAM_{name}"]) for name in ("ONLY", "LEFT_OUT"))
"""Patterns of the tests to run, and of those not to run."""
built: collections.Counter[str] = collections.Counter()
_patched: set[type] = set()
_records: dict[str, dict[str, Any]] = {}


def count_models() -> None:
    """Count the models that are built, by whether they have a scheme."""
    stock = PreTrainedModel.__init__

    @functools.wraps(stock)
    def __init__(self: PreTrainedModel, config: Any, *args: Any, **kwargs: Any) -> None:
        stock(self, config, *args, **kwargs)
        built["variant" if getattr(config, "position_scheme", None) is not None else "stock"] += 1

    PreTrainedModel.__init__ = __init__


def patch_testers(module: Any) -> None:
    """Let the model testers of a test module make configs with the scheme, and with weights that are large enough.

    With the small weights of the testers, attention is almost uniform, and hides mistakes.
    """
    for tester in list(vars(module).values()):
        if not isinstance(tester, type) or not hasattr(tester, "get_config") or tester in _patched:
            continue
        _patched.add(tester)
        tester.get_config = with_scheme(tester.get_config)


def with_scheme(get_config: Any) -> Any:
    @functools.wraps(get_config)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        config = get_config(self, *args, **kwargs)
        config.initializer_range = INITIALIZER_RANGE
        if SCHEME is not None:
            config.position_scheme = SCHEME
        return config

    return wrapped


def pytest_configure() -> None:
    count_models()
    RESULTS.unlink(missing_ok=True)


@pytest.hookimpl(tryfirst=True)
def pytest_pycollect_makeitem(collector: Any, name: str, obj: Any) -> None:
    """Before the methods of a test class are collected."""
    if isinstance(obj, type) and issubclass(obj, unittest.TestCase):
        patch_testers(collector.module)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: Any, items: list[Any]) -> None:
    chosen = [item for item in items if ONLY.search(item.nodeid) and not LEFT_OUT.search(item.nodeid)]
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = chosen


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: Any) -> Iterator[None]:
    random.seed(0)
    numpy.random.seed(0)
    torch.manual_seed(0)
    if hasattr(transformers.testing_utils, "global_rng"):
        transformers.testing_utils.global_rng.seed(0)
    built.clear()
    try:
        yield
    finally:
        _record(item.nodeid)["built"] = dict(built)


def pytest_runtest_logreport(report: Any) -> None:
    record = _record(report.nodeid)
    if report.outcome != "passed":
        is_worse = record["outcome"] != "failed"
        if is_worse and report.longrepr is not None:
            crash = getattr(report.longrepr, "reprcrash", None)
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else getattr(crash, "message", "")
            record["reason"] = str(reason)[:1000]
        if is_worse and (report.outcome == "failed" or type(report).__name__ == "TestReport"):
            record["outcome"] = report.outcome  # a skipped subtest leaves the others
    if report.when == "teardown":
        with RESULTS.open("a", encoding="utf-8") as file:
            file.write(json.dumps(_records.pop(report.nodeid)) + "\n")


def _record(nodeid: str) -> dict[str, Any]:
    name = nodeid.split("::", 1)[-1]
    return _records.setdefault(nodeid, {"test": name, "outcome": "passed", "reason": "", "built": {}})
