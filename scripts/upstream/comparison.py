"""Compare the outcomes of tests on variants with those on stock models."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

Outcomes = dict[str, dict[str, Any]]
"""By the name of the test, what `plugin` recorded of it."""


class Excuse(NamedTuple):
    """Why a test cannot hold for a variant: patterns of its name and of its failure, and the scheme, if only one."""

    test: str
    failure: str
    scheme: str | None
    why: str


EXCUSED = (
    Excuse("test_inherits_generation_mixin", "", None, "looks for GenerationMixin among the direct bases of a class"),
    Excuse("test_model_rope_scaling", "", None, "asserts that rope_parameters matter; other schemes do not read them"),
    Excuse("", r"torch\.Size\(.*\) != \(", "forget", "asserts the shape of cached keys, where gates are kept"),
    Excuse("custom_4d", "sums over the tokens between", "forget", "hides tokens between a query and its keys"),
)


class Deviation(NamedTuple):
    """A test that went otherwise than for the stock model."""

    kind: str
    test: str
    reason: str


def deviations(stock: Outcomes, variant: Outcomes, scheme: Any) -> list[Deviation]:
    """All tests that went otherwise, also those that pass but tested nothing.

    Args:
        stock: The outcomes for the stock model.
        variant: The outcomes for the variant.
        scheme: The position scheme of the variant.

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
        if kind is not None and not any(_applies(excuse, test, now["reason"], scheme) for excuse in EXCUSED):
            deviations.append(Deviation(kind, test, now["reason"]))
    return deviations


def _applies(excuse: Excuse, test: str, reason: str, scheme: Any) -> bool:
    of_scheme = excuse.scheme is None or excuse.scheme in (scheme, isinstance(scheme, dict) and scheme.get("type"))
    return of_scheme and bool(re.search(excuse.test, test) and re.search(excuse.failure, reason, re.DOTALL))


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
