"""Options of a scheme: frozen keyword-only dataclasses, checked against their own type hints when built."""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Callable
from typing import Any

from ..validation import MAX_INTEGER, truncate_repr

Check = Callable[[Any], "str | None"]


def option(default: Any, doc: str, check: Check | None = None) -> Any:
    """A field of an options dataclass; `check` returns what is wrong with a value, or None."""
    metadata = {"doc": doc, "check": check, "default": default}
    if isinstance(default, list):
        return dataclasses.field(default_factory=default.copy, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def positive(value: float) -> str | None:
    return None if value > 0 else "must be above 0"


def at_least(minimum: float) -> Check:
    return lambda value: None if value >= minimum else f"must be at least {minimum}"


def fraction(value: float) -> str | None:
    return None if 0 < value <= 1 else "must be above 0 and at most 1"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """What a scheme can be told. Subclasses add fields made with `option`."""

    def __post_init__(self) -> None:
        hints = typing.get_type_hints(type(self))
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if not matches_type(hints[field.name], value):
                raise ValueError(
                    f"{field.name} must be {describe_type(hints[field.name])}, got {truncate_repr(value)}{_way_out(field.name, value)}"
                )
            if isinstance(value, int) and value > MAX_INTEGER:
                raise ValueError(f"{field.name} must be at most {MAX_INTEGER:,}, got {truncate_repr(value)}")
            check = field.metadata["check"]
            if value is not None and check is not None and (problem := check(value)):
                raise ValueError(f"{field.name} {problem}, got {truncate_repr(value)}")


def _way_out(name: str, value: Any) -> str:
    """What somebody meant who wrote something that a config cannot do: it would fit again whenever it is loaded."""
    if (name, value) == ("init", "fit"):
        return "; hf_posenc.fit and hf-posenc train fit a scheme to the encoding that a checkpoint has"
    return ""


def matches_type(hint: Any, value: Any) -> bool:
    """Whether `value`, as it comes out of JSON, is of the type `hint`."""
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        return any(matches_type(part, value) for part in typing.get_args(hint))
    if origin is typing.Literal:
        return isinstance(value, str) and value in typing.get_args(hint)
    if origin is list:
        (item,) = typing.get_args(hint)
        return isinstance(value, list) and all(matches_type(item, part) for part in value)
    if origin is not None:
        return isinstance(value, origin)
    if hint is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool) and _is_float(value)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, hint)


def _is_float(value: float) -> bool:
    try:
        return math.isfinite(float(value))
    except OverflowError:  # a whole number too long for a float
        return False


def describe_type(hint: Any) -> str:
    """A type hint in words that stand in an error message or a reference page."""
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(describe_type(part) for part in typing.get_args(hint))
    if origin is typing.Literal:
        return " or ".join(repr(part) for part in typing.get_args(hint))
    if hint is type(None):
        return "None"
    if origin is dict:
        return "a dict"
    if origin is list:
        return f"a list of {', '.join(map(describe_type, typing.get_args(hint)))}"
    words = {float: "a finite number", int: "a whole number", bool: "true or false", str: "a string"}
    return words.get(hint, str(getattr(hint, "__name__", hint)))
