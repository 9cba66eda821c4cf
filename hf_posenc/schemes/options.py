"""Scheme options: frozen dataclasses that check their values against their type hints and bounds."""

from __future__ import annotations

import copy
import dataclasses
import sys
import types
import typing
from collections.abc import Mapping

from typing_extensions import dataclass_transform

from ..errors import PosEncError
from ..validation import MAX_INTEGER, truncate_repr

T = typing.TypeVar("T")


def option(
    default: T, doc: str, *, minimum: float | None = None, above: float | None = None, maximum: float | None = None
) -> T:
    """Declare a field of an options dataclass.

    Args:
        default: The value if the user gives none.
        doc: What the option does, in one line. Shown by `list_schemes` and in the reference page.
        minimum: The smallest valid number.
        above: A number that valid values must exceed.
        maximum: The largest valid number.

    Returns:
        A dataclass field, typed as its default.

    Example:
        >>> num_buckets: int = option(32, "rows of the bias table", minimum=2)
    """
    metadata = {"default": default, "doc": doc, "minimum": minimum, "above": above, "maximum": maximum}
    return dataclasses.field(default_factory=lambda: copy.copy(default), metadata=metadata)


@dataclass_transform(frozen_default=True, kw_only_default=True)
@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """Base of all scheme options. Subclasses become frozen, keyword-only dataclasses; declare fields with `option`.

    Options are built from JSON, so a field is typed as a bool, int, float, str, Literal, list, dict, None or a union.

    Raises:
        PosEncError: If a value does not match its type hint or is out of bounds.

    Example:
        >>> class MyOptions(Options):
        ...     slope: float = option(0.1, "penalty per token of distance", above=0)
    """

    def __init_subclass__(cls) -> None:
        dataclasses.dataclass(frozen=True, kw_only=True)(cls)

    def __post_init__(self) -> None:
        hints = typing.get_type_hints(type(self))
        for field in dataclasses.fields(self):
            name, value, hint = field.name, getattr(self, field.name), hints[field.name]
            assert field.metadata, f"declare {name} with option(), and do not decorate {type(self).__name__}"
            if not matches_type(value, hint):
                # A fitted start cannot be an option: the scheme would be fitted again on every load.
                fit = "; hf_posenc.fit and hf-posenc train fit a scheme to a checkpoint" if value == "fit" else ""
                raise PosEncError(f"{name} must be {describe_type(hint)}, got {truncate_repr(value)}{fit}")
            if isinstance(value, (int, float)) and (problem := _out_of_bounds(value, field.metadata)):
                raise PosEncError(f"{name} must be {problem}, got {truncate_repr(value)}")


def _out_of_bounds(value: float, bounds: Mapping[str, float | None]) -> str | None:
    minimum, above, maximum = bounds["minimum"], bounds["above"], bounds["maximum"]
    if maximum is None and isinstance(value, int):
        maximum = MAX_INTEGER
    if above is not None and value <= above:
        return f"above {above}"
    if minimum is not None and value < minimum:
        return f"at least {minimum}"
    return f"at most {maximum:,}" if maximum is not None and value > maximum else None


def matches_type(value: object, hint: object) -> bool:
    """Whether a value read from JSON has the type of a hint."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return any(matches_type(value, member) for member in arguments)
    if origin is typing.Literal:
        return isinstance(value, str) and value in arguments
    if origin is list:
        return isinstance(value, list) and all(matches_type(item, arguments[0]) for item in value)
    if hint is float:
        # False for NaN, infinities and integers that no float can hold.
        return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= sys.float_info.max
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    expected = origin or hint
    assert isinstance(expected, type)
    return isinstance(value, expected)


def describe_type(hint: object) -> str:
    """A type hint in words, for error messages and the reference page."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(describe_type(member) for member in arguments)
    if origin is typing.Literal:
        return " or ".join(repr(member) for member in arguments)
    if origin is list:
        return f"a list of {describe_type(arguments[0])}"
    words = {float: "a finite number", int: "a whole number", bool: "true or false", dict: "a dict", type(None): "None"}
    expected = origin or hint
    assert isinstance(expected, type)
    return words.get(expected, expected.__name__)
