"""Compare the outcomes of tests on variants with those on stock models."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

Outcomes = dict[str, dict[str, Any]]
"""By the name of the test, what `plugin` recorded of it."""
EXCUSED = {
    r"test_inherits_generation_mixin": "looks for GenerationMixin among the direct bases of a class",
    r"test_model_rope_scaling": "asserts that config.rope_parameters change the output; other schemes do not read them",
}
"""Tests that cannot hold for a variant, with the reason."""


class Deviation(NamedTuple):
    """A test that went otherwise than for the stock model."""

    kind: str
    test: str
    reason: str


def deviations(stock: Outcomes, variant: Outcomes) -> list[Deviation]:
    """All tests that went otherwise, also those that pass but tested nothing.

    Args:
        stock: The outcomes for the stock model.
        variant: The outcomes for the variant.

    Returns:
        What deviates, without what is excused.
    """
    deviations = []
    for test in sorted(stock.keys() | variant.keys()):
        before, now = stock.get(test), variant.get(test)
        if now is None or before is None:
            deviations.append(Deviation("not run", test, "for the variant" if now is None else "for the stock model"))
            continue
        kind = _kind(before, now)
        if kind is not None and not any(re.search(pattern, test) for pattern in EXCUSED):
            deviations.append(Deviation(kind, test, now["reason"]))
    return deviations


def _kind(before: dict[str, Any], now: dict[str, Any]) -> str | None:
    outcomes = before["outcome"], now["outcome"]
    if outcomes == ("passed", "passed"):
        if before["built"] and not now["built"]:
            return "built no model"
        if before["built"] and not now["built"].get("variant"):
            return "built no variant"
        return None
    if now["outcome"] == "failed" and before["outcome"] != "failed":
        return "fails"
    return "is skipped" if outcomes == ("passed", "skipped") else None
