"""The schemes by name: every scheme class in `hf_posenc.schemes`, and those that users register."""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil
import typing
from typing import Any

from . import schemes
from .errors import PosEncError
from .schemes import Kind, Options, Scheme, describe_type

SCHEMES: dict[str, type[Scheme]] = {}
"""Every registered scheme by its name in `position_scheme`."""
REQUIRED_ATTRIBUTES = ("name", "paper")


def register_scheme(scheme: type[Scheme]) -> type[Scheme]:
    """Make a scheme available in `position_scheme` under its `name`.

    Works as a class decorator.

    Args:
        scheme: A subclass of `Scheme` with a `name` and a `paper`.

    Returns:
        The class itself.

    Raises:
        PosEncError: If an attribute is missing or another scheme already has the name.

    Example:
        >>> @hf_posenc.register_scheme
        ... class MyBias(hf_posenc.schemes.Scheme): ...
    """
    missing = [attribute for attribute in REQUIRED_ATTRIBUTES if not hasattr(scheme, attribute)]
    if missing:
        raise PosEncError(f"Cannot register {scheme.__name__}: it does not define {', '.join(missing)}")
    if SCHEMES.get(scheme.name, scheme) is not scheme:
        raise PosEncError(f"A scheme named {scheme.name!r} is already registered: {SCHEMES[scheme.name]!r}")
    SCHEMES[scheme.name] = scheme
    return scheme


@dataclasses.dataclass(frozen=True)
class OptionInfo:
    """One option of a scheme."""

    type: str
    default: Any
    doc: str


@dataclasses.dataclass(frozen=True)
class SchemeInfo:
    """One scheme: `print` it to read it."""

    name: str
    summary: str
    paper: str
    kind: Kind
    formula: str
    cost: str
    neutral: str
    tested_against: str
    extends: bool
    options: dict[str, OptionInfo]

    def __str__(self) -> str:
        reach = "runs past the trained length" if self.extends else "ends with its table"
        lines = [f"{self.name}: {self.summary}", f"  {self.formula}", f"  {self.paper}; {reach}"]
        for name, info in self.options.items():
            lines.append(f"  {name} = {info.default!r} ({info.type}): {info.doc}")
        return "\n".join(lines)


LAYER_SELECTION = "a list of layer numbers, a slice such as '0:6' or '3::4', or a layer type"
LAYERS = OptionInfo(LAYER_SELECTION, None, "the layers it acts in; None: all")
EXCEPT_LAYERS = OptionInfo(LAYER_SELECTION, None, "layers it does not act in")


def describe_options(options: type[Options]) -> dict[str, OptionInfo]:
    """Read the type, default and description of each option off its class."""
    hints = typing.get_type_hints(options)
    return {
        field.name: OptionInfo(describe_type(hints[field.name]), field.metadata["default"], field.metadata["doc"])
        for field in dataclasses.fields(options)
    }


def describe(scheme: type[Scheme]) -> SchemeInfo:
    """Read a scheme's name, summary, paper and options off its class."""
    options = describe_options(scheme.Options)
    if not scheme.at_input:
        options |= {"layers": LAYERS, "except_layers": EXCEPT_LAYERS}
    summary = (scheme.__doc__ or "").strip().splitlines()[0]
    facts = (scheme.name, summary, scheme.paper, scheme.kind, scheme.formula, scheme.cost, scheme.neutral)
    return SchemeInfo(*facts, scheme.tested_against, scheme.extends, options)


def list_schemes() -> dict[str, SchemeInfo]:
    """List every registered scheme.

    Returns:
        A description of each scheme by name. Print one to read its formula, paper and options.

    Example:
        >>> print(hf_posenc.list_schemes()["alibi"])
    """
    return {name: describe(scheme) for name, scheme in SCHEMES.items()}


def _register_package() -> None:
    """Register every scheme class defined in a module of `hf_posenc.schemes`."""
    classes: list[type[Scheme]] = []
    for file in pkgutil.iter_modules(schemes.__path__):
        module = importlib.import_module(f"{schemes.__name__}.{file.name}")
        for value in vars(module).values():
            is_scheme = isinstance(value, type) and issubclass(value, Scheme) and value.__module__ == module.__name__
            if is_scheme and "name" in vars(value):
                classes.append(value)
    for scheme in sorted(classes, key=lambda scheme: scheme.name):
        register_scheme(scheme)


_register_package()
