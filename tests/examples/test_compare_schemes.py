"""The comparison from scratch, at a small size."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

import hf_posenc  # noqa: F401
from examples.compare_schemes import SCHEMES, parse_scheme

ROOT = Path(__file__).parents[2]
SIZES = [
    "--steps",
    "3",
    "--length",
    "16",
    "--batch-size",
    "2",
    "--width",
    "16",
    "--layers",
    "1",
    "--test-tokens",
    "512",
]


def run(*options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "examples.compare_schemes", *SIZES, *options],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


@pytest.mark.parametrize(
    ("text", "name", "scheme"),
    [
        ("rope", "rope", "rope"),
        ('{"type": "t5", "num_buckets": 8}', '{"type": "t5", "num_buckets": 8}', {"type": "t5", "num_buckets": 8}),
        ('short={"type": "t5"}', "short", {"type": "t5"}),
        ("mine=alibi", "mine", "alibi"),
        ('both=["rope", "alibi"]', "both", ["rope", "alibi"]),
    ],
)
def test_schemes_are_parsed(text: str, name: str, scheme: object) -> None:
    assert parse_scheme(text) == (name, scheme)


def test_five_schemes_are_compared_by_default() -> None:
    assert [parse_scheme(text)[0] for text in SCHEMES] == ["learned", "rope", "alibi", "t5", "none"]


@pytest.mark.slow
def test_one_command_trains_plots_and_tabulates(tmp_path: Path) -> None:
    done = run("--output-dir", str(tmp_path / "out"))
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads((tmp_path / "out" / "evaluation.json").read_text())
    assert report["models"] == ["learned", "rope", "alibi", "t5", "none"]
    assert {row["length"] for row in report["perplexity"]} == {8, 16, 32, 64}
    stopped = {(row["model"], row["length"]) for row in report["perplexity"] if row["perplexity"] is None}
    assert stopped == {("learned", 32), ("learned", 64)}
    table = (tmp_path / "out" / "comparison.md").read_text()
    assert re.search(r"\| +learned \|", table)
    assert "learned cannot read that far" in done.stdout
    for name in ("length_curve.png", "training_loss.png"):
        assert (tmp_path / "out" / name).read_bytes().startswith(b"\x89PNG")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "models" / "t5")
    assert model.config.position_scheme["init"] == "paper"


@pytest.mark.slow
def test_own_text_and_schemes(tmp_path: Path) -> None:
    (tmp_path / "my.txt").write_text("one two three four " * 2000)
    options = ["--data", str(tmp_path / "my.txt"), "--schemes", "alibi", 'short t5={"type": "t5", "max_distance": 40}']
    done = run(*options, "--output-dir", str(tmp_path / "out"))
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads((tmp_path / "out" / "evaluation.json").read_text())["models"] == ["alibi", "short t5"]
    assert (tmp_path / "out" / "models" / "short-t5" / "config.json").is_file()
    held_out = (tmp_path / "out" / "text" / "test.txt").read_text()
    assert len(held_out) == 19 * 2000 // 32
