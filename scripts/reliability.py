"""Run the tests of what docs/reliability.md promises, and record how much they cover (`make test-reliability`).

The counts go to benchmarks/reliability.json, one entry per promise, and from there to the page (scripts/fill_pages.py).
A promise whose tests fail loses its entry.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "reliability.json"
COUNTS_FILE = "HF_POSENC_RELIABILITY_COUNTS"
"""The environment variable with the file that tests append counts of their cases to; see tests/support/evidence.py."""


@dataclasses.dataclass(frozen=True)
class Promise:
    """Something that the tests in some files check; `keyword` selects among them as pytest's -k does."""

    text: str
    files: tuple[str, ...]
    keyword: str = ""


MODEL_TESTS = ("tests/integration/test_matrix.py", "tests/integration/test_families.py", "tests/attention")
ORACLES = ("decoder", "encoder", "relative", "scheme")
REFUSAL_TESTS = ("tests/checkpoints/test_convert_refusals.py", "tests/cli/test_bad_places.py")
PROMISES = {
    "stock": Promise(
        "Stock models stay bit-identical, with the package imported and after `restore`",
        ("tests/test_package.py", "tests/patches/test_retrofit.py", "tests/patches/test_loading.py"),
    ),
    "invariances": Promise(
        "The same tokens give the same outputs: cached, padded, packed, with gaps, on every backend and in every dtype",
        MODEL_TESTS,
        "not generat",
    ),
    "generation": Promise(
        "`generate` gives the same tokens as running each row alone without a cache",
        ("tests/integration", "tests/patches/test_parts.py"),
        "generat",
    ),
    "oracles": Promise(
        "Schemes agree with independent implementations",
        (*(f"tests/integration/test_{name}_oracles.py" for name in ORACLES), "tests/schemes"),
    ),
    "hostile": Promise(
        "Hostile files are refused; they cannot run code or leak private files",
        (
            "tests/checkpoints/test_untrusted_input.py",
            "tests/checkpoints/test_config_fields.py",
            "tests/checkpoints/test_companions.py",
            "tests/training/test_source_files.py",
            "tests/cli/test_untrusted_checkpoints.py",
            "tests/hub/test_untrusted_cards.py",
            "tests/hub/test_push_untrusted.py",
        ),
    ),
    "fuzz": Promise(
        "Any config, scheme or safetensors header is either read or refused with an error",
        ("tests/checkpoints/test_fuzz.py",),
    ),
    "kills": Promise("A killed command writes the same bytes when it is run again", ("tests/cli/test_kill_points.py",)),
    "interruptions": Promise(
        "An interrupted training run ends with the weights of an uninterrupted one",
        (
            "tests/training/test_interruptions.py",
            "tests/training/test_checkpointing.py",
            "tests/training/test_edited_checkpoints.py",
        ),
    ),
    "locks": Promise("Only one process at a time writes an output", ("tests/checkpoints/test_locks.py",)),
    "places": Promise(
        "Bad data, paths and values end a command with exit code 2 and one sentence",
        (
            "tests/cli/test_bad_places.py",
            "tests/cli/test_bad_training.py",
            "tests/training/test_argument_checks.py",
            "tests/checkpoints/test_convert_refusals.py",
        ),
    ),
}


def run_tests(promise: Promise, workers: int) -> dict[str, Any] | None:
    """Run the tests of a promise; None if any fails.

    Args:
        promise: The promise.
        workers: Processes to run them with.

    Returns:
        How many tests passed and were skipped, how many cases they counted, and with which versions.
    """
    with tempfile.TemporaryDirectory() as directory:
        report, counts = Path(directory) / "report.xml", Path(directory) / "counts.jsonl"
        command = [sys.executable, "-m", "pytest", "-m", "slow or not slow", f"--junitxml={report}", *promise.files]
        command += ["-k", promise.keyword] if promise.keyword else []
        command += ["-n", str(workers)] if workers > 1 else []
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", COUNTS_FILE: str(counts)}
        if subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode:
            return None
        suite = next(ElementTree.parse(report).iter("testsuite"))
        cases: Counter[str] = Counter()
        for line in counts.read_text(encoding="utf-8").splitlines() if counts.exists() else ():
            cases[json.loads(line)["name"]] += json.loads(line)["number"]
    skipped = int(suite.attrib["skipped"])
    return {
        "tests": int(suite.attrib["tests"]) - skipped,
        "skipped": skipped,
        "cases": dict(sorted(cases.items())),
        "date": datetime.date.today().isoformat(),
        "versions": {
            "python": platform.python_version(),
            **{name: version(name) for name in ("torch", "transformers")},
        },
    }


def table_rows(results: dict[str, Any]) -> list[list[str]]:
    """The rows of the page's table: promise, tests, cases and date."""
    rows = []
    for name, promise in PROMISES.items():
        result = results.get(name)
        if result is None:
            rows.append([promise.text, "not counted yet", "", ""])
            continue
        skipped = f" ({result['skipped']:,} skipped)" if result["skipped"] else ""
        cases = ", ".join(f"{number:,} {kind}" for kind, number in result["cases"].items())
        rows.append([promise.text, f"{result['tests']:,}{skipped}", cases, result["date"]])
    return rows


def read_results() -> dict[str, Any]:
    """What is recorded so far."""
    return json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.is_file() else {}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the tests and record the counts; returns 1 if a test fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(PROMISES), help="promises to test; default: all")
    parser.add_argument("--workers", type=int, default=1, help="processes to run tests with")
    options = parser.parse_args(arguments)
    failed = []
    for name in options.only or PROMISES:
        result = run_tests(PROMISES[name], options.workers)
        results = {**read_results(), name: result}
        if result is None:
            failed.append(name)
            del results[name]
        RESULTS.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    for text, tests, cases, _ in table_rows(read_results()):
        print(f"{text}: {tests}{f'; {cases}' if cases else ''}")
    print(f"FAILED: {', '.join(failed)}" if failed else "All of them hold.")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
