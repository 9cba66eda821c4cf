"""Counts of the cases inside tests, for the report of `make test-reliability`."""

from __future__ import annotations

import json
import os
from pathlib import Path

from scripts.reliability import COUNTS_FILE


def count_cases(name: str, number: int) -> None:
    """Report that a test has gone through a number of cases, all of which passed. Call it at the end of the test."""
    path = os.environ.get(COUNTS_FILE)
    if path:
        with Path(path).open("a", encoding="utf-8") as file:
            file.write(json.dumps({"name": name, "number": number}) + "\n")
