"""Which combinations of parameters `make test` runs; `make test-all` runs them all."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Container, Iterable, Sequence
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


def sampled(
    exclude: Container[Any] = (), slow: Container[Any] = (), every: int = 1, **axes: Sequence[Any]
) -> pytest.MarkDecorator:
    """Parametrize over a first axis, usually the architecture, and others; mark all but a sample as slow.

    `make test` runs every combination of the other axes with one value of the first, which changes from combination to
    combination. `make test-all` runs all.

    Args:
        exclude: Combinations that do not exist, as tuples.
        slow: Values of the other axes that only `make test-all` runs.
        every: `make test` runs one in so many combinations of the other axes. It must not exceed the number of values
            of any axis, so that every value still runs.
        **axes: The values of each parameter.
    """
    (first_axis, first_values), *other_axes = axes.items()
    rows = []
    for indices in itertools.product(*(range(len(values)) for _, values in other_axes)):
        combination = [values[index] for (_, values), index in zip(other_axes, indices, strict=True)]
        left_out = sum(indices) % every or any(value in slow for value in combination)
        allowed = [value for value in first_values if (value, *combination) not in exclude]
        for number, value in enumerate(allowed):
            fast = not left_out and number == sum(indices) // every % len(allowed)
            marks = [] if fast else [pytest.mark.slow]
            rows.append(pytest.param(value, *combination, marks=marks, id="-".join(map(str, (value, *combination)))))
    return pytest.mark.parametrize((first_axis, *(name for name, _ in other_axes)), rows)


def repeated_types(schemes: Sequence[Any]) -> list[Any]:
    """The schemes of a list whose type an earlier one has; variations to leave to `make test-all`."""
    types = [scheme if isinstance(scheme, str) else scheme["type"] for scheme in schemes]
    return [scheme for number, scheme in enumerate(schemes) if types[number] in types[:number]]
