"""Which combinations of parameters `make test` runs; `make test-all` runs them all."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest


def combinations(**axes: Sequence[Any]) -> Callable[[Any], Any]:
    """Parametrize a test with all combinations of the values of some axes.

    `make test` runs as many of them as the longest axis has values, so that every value of each axis occurs.

    Example:
        >>> @combinations(architecture=["bert", "gpt2", "llama"], causal=[True, False])
        ... def test_something(architecture: str, causal: bool) -> None: ...
    """
    longest = max(map(len, axes.values()))
    fast = {tuple(index % len(values) for values in axes.values()) for index in range(longest)}
    rows = [
        pytest.param(
            *(values[index] for values, index in zip(axes.values(), indices, strict=True)),
            id="-".join(_label(values[index]) for values, index in zip(axes.values(), indices, strict=True)),
            marks=[] if indices in fast else [pytest.mark.slow],
        )
        for indices in itertools.product(*(range(len(values)) for values in axes.values()))
    ]
    return pytest.mark.parametrize(tuple(axes), rows)


def some(name: str, values: Iterable[Any], fast: Sequence[Any]) -> Callable[[Any], Any]:
    """Parametrize a test with all values, of which `make test` runs those in `fast`."""
    rows = [
        pytest.param(value, id=_label(value), marks=[] if value in fast else [pytest.mark.slow]) for value in values
    ]
    missing = [value for value in fast if value not in [row.values[0] for row in rows]]
    if missing:
        raise ValueError(f"no values of {name}: {missing}")
    return pytest.mark.parametrize(name, rows)


def _label(value: Any) -> str:
    return str(value) or "empty"
