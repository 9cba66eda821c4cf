"""Parametrize tests over all combinations, of which `make test` runs a sample."""

from __future__ import annotations

import itertools
from collections.abc import Container, Sequence
from typing import Any

import pytest


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
