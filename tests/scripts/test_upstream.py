"""`make test-upstream`: the comparison with stock models, and a suite of our own in place of transformers'."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from scripts.upstream import __main__ as main
from scripts.upstream import record
from scripts.upstream.__main__ import run_suite, suites
from scripts.upstream.comparison import deviations

SUITE = """
import unittest

import torch
from transformers import GPT2Config, GPT2DoubleHeadsModel, GPT2LMHeadModel


class GPT2ModelTester:
    def get_config(self):
        return GPT2Config(vocab_size=61, n_embd=32, n_layer=1, n_head=4, n_positions=16)


class GPT2ModelTest(unittest.TestCase):
    def test_longer_than_the_table(self):
        with self.assertRaises(IndexError):
            GPT2LMHeadModel(GPT2ModelTester().get_config())(torch.zeros(1, 20, dtype=torch.long))

    def test_double_heads(self):
        model = GPT2DoubleHeadsModel(GPT2ModelTester().get_config())
        self.assertEqual(model.config.initializer_range, 0.3)

    def test_of_nothing(self):
        self.skipTest("nothing")

    def test_pipeline_from_the_hub(self):
        raise AssertionError("not run")
"""


def outcome(result: str = "passed", reason: str = "", **built: int) -> dict[str, Any]:
    return {"outcome": result, "reason": reason, "built": built}


def test_every_kind_of_deviation() -> None:
    stock = {name: outcome(stock=2) for name in ("same", "fails", "skips", "builds_none", "escapes", "is_lost")}
    stock |= {"wakes": outcome("skipped"), "broken": outcome("failed"), "test_model_rope_scaling_0": outcome(stock=1)}
    variant = {
        "same": outcome(variant=2),
        "fails": outcome("failed", "ValueError", variant=1),
        "skips": outcome("skipped"),
        "builds_none": outcome(),
        "escapes": outcome(stock=2),
        "wakes": outcome("failed", variant=1),
        "broken": outcome("failed", variant=1),
        "test_model_rope_scaling_0": outcome("failed", variant=1),
    }
    kinds = {test: kind for kind, test, _ in deviations(stock, variant, "alibi")}
    assert kinds == {
        "fails": "fails",
        "skips": "is skipped",
        "builds_none": "built no model",
        "escapes": "built no variant",
        "is_lost": "not run",
        "wakes": "fails",
    }
    assert deviations(stock, stock, "alibi") != [], "a stock model in place of a variant is seen"


def test_excuses_are_for_one_scheme_and_one_failure() -> None:
    shape = "AssertionError: torch.Size([4, 2, 9, 17]) != (4, 2, 9, 16)"
    stock = {"test_cache": outcome(stock=1), "test_custom_4d_mask": outcome(stock=1)}
    variant = {
        "test_cache": outcome("failed", shape, variant=1),
        "test_custom_4d_mask": outcome("failed", "this scheme sums over the tokens between query and key", variant=1),
    }
    for scheme in ("forget", {"type": "forget", "form": "cable"}):
        assert not deviations(stock, variant, scheme)
    assert len(deviations(stock, variant, "alibi")) == 2
    variant["test_cache"]["reason"] = "AssertionError: Tensor-likes are not close!"
    assert [test for _, test, _ in deviations(stock, variant, "forget")] == ["test_cache"]


def test_runs_are_recorded_and_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "upstream.json"
    assert record.table_row(path)[1:] == ["not counted yet", "", ""]
    variant = {"first": outcome(variant=1), "second": outcome(variant=1), "third": outcome("skipped")}
    good = record.summarize(variant, 0, 0)
    bad = record.summarize({**variant, "second": outcome("failed", variant=1)}, 1, 2)
    record.add_to_record("gpt2", "alibi", bad, path)
    assert not record.is_done("gpt2", "alibi", path)
    assert record.table_row(path)[1:3] == [
        "1, and 1 that deviate",
        "1 model types, 1 schemes, 1 pairs of them; 2 more tests fail with some random weights, for stock models or "
        "for variants",
    ]
    record.add_to_record("gpt2", "alibi", good, path)
    record.add_to_record("bert", "alibi", good, path)
    assert record.is_done("gpt2", "alibi", path)
    assert not record.is_done("gpt2", "t5", path)
    assert record.table_row(path)[1:3] == ["4", "2 model types, 1 schemes, 2 pairs of them"]
    monkeypatch.setattr(record, "version", lambda name: "6.0")
    assert not record.is_done("gpt2", "alibi", path), "another release is tested again"


@pytest.mark.slow
def test_a_suite_is_run_with_a_scheme(tmp_path: Path) -> None:
    directory = tmp_path / "tests" / "models" / "gpt2"
    directory.mkdir(parents=True)
    (directory / "test_modeling_gpt2.py").write_text(SUITE)
    files = suites(tmp_path)
    assert list(files) == ["gpt2"]
    stock = run_suite(tmp_path, files["gpt2"], None, tmp_path / "stock.jsonl", "")
    variant = run_suite(tmp_path, files["gpt2"], "alibi", tmp_path / "alibi.jsonl", "")
    assert {name.split("::")[-1]: record["outcome"] for name, record in stock.items()} == {
        "test_longer_than_the_table": "passed",
        "test_double_heads": "passed",
        "test_of_nothing": "skipped",
    }
    assert all(record["built"].get("variant") for record in variant.values() if record["outcome"] != "skipped")
    differences = deviations(stock, variant, "alibi")
    assert [(kind, test.split("::")[-1]) for kind, test, _ in differences] == [("fails", "test_longer_than_the_table")]


def test_deviations_count_if_other_random_weights_show_them(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [main.Deviation("fails", name, "not close") for name in ("always", "once")]

    def run_suite(checkout: Any, file: Any, scheme: Any, results: Any, only: str, number: float) -> dict[str, Any]:
        assert only == "always$|once$"
        if scheme is None:
            return {name: outcome(stock=1) for name in ("always", "once")}
        once = "failed" if number == main.OTHER_RANGES[0] else "passed"
        return {"always": outcome("failed", variant=1), "once": outcome(once, variant=1)}

    monkeypatch.setattr(main, "run_suite", run_suite)
    assert main.confirm(found, Path(), Path(), "alibi", Path()) == found[:1]
    assert main.confirm([], Path(), Path(), "alibi", Path()) == []
