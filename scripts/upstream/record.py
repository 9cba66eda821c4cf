"""How transformers' own tests went on variants: benchmarks/upstream.json, and a row of the reliability page."""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

from .comparison import Outcomes

RECORD = Path(__file__).parents[2] / "benchmarks" / "upstream.json"
PROMISE = "Transformers' own model tests go for variants as they go for stock models"


def read_record(path: Path = RECORD) -> dict[str, dict[str, dict[str, Any]]]:
    """By model type and scheme, what `summarize` returned."""
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def add_to_record(model_type: str, scheme: str, summary: dict[str, Any], path: Path = RECORD) -> None:
    """Record a run, in place of an earlier one."""
    record = read_record(path)
    record.setdefault(model_type, {})[scheme] = summary
    path.write_text(json.dumps(record, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def summarize(variant: Outcomes, num_deviations: int, num_unstable: int) -> dict[str, Any]:
    """How many tests passed for a variant, how many deviated from stock (always, or not), and in which release."""
    return {
        "tests": sum(record["outcome"] == "passed" for record in variant.values()),
        "deviations": num_deviations,
        "unstable": num_unstable,
        "transformers": version("transformers"),
        "date": datetime.date.today().isoformat(),
    }


def is_done(model_type: str, scheme: str, path: Path = RECORD) -> bool:
    """Whether a run without deviations is recorded for the installed release of transformers."""
    summary = read_record(path).get(model_type, {}).get(scheme, {})
    return summary.get("deviations") == 0 and summary.get("transformers") == version("transformers")


def table_row(path: Path = RECORD) -> list[str]:
    """The row of the reliability page: promise, tests, cases and date."""
    record = read_record(path)
    runs = list(_runs(record))
    if not runs:
        return [PROMISE, "not counted yet", "", ""]
    tests, deviating, unstable = (sum(run[key] for run in runs) for key in ("tests", "deviations", "unstable"))
    schemes = {scheme for by_scheme in record.values() for scheme in by_scheme}
    cases = f"{len(record)} model types, {len(schemes)} schemes, {len(runs)} pairs of them"
    result = f"{tests:,}" + (f", and {deviating:,} that deviate" if deviating else "")
    if unstable:
        cases += f"; {unstable:,} more tests fail with some random weights, for stock models or for variants"
    return [PROMISE, result, cases, max(run["date"] for run in runs)]


def _runs(record: dict[str, dict[str, dict[str, Any]]]) -> Iterator[dict[str, Any]]:
    for by_scheme in record.values():
        yield from by_scheme.values()
