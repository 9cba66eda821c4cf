"""What schemes there are and what each can be told, as data and as text."""

from __future__ import annotations

import dataclasses
import typing
from typing import Any

from .options import spell
from .scheme import Kind, Scheme


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
    extends: bool
    options: dict[str, OptionInfo]

    def __str__(self) -> str:
        reach = "runs past the trained length" if self.extends else "ends with its table"
        lines = [f"{self.name}: {self.summary}", f"  {self.formula}", f"  {self.paper}; {reach}"]
        for name, info in self.options.items():
            lines.append(f"  {name} = {info.default!r} ({info.type}): {info.doc}")
        return "\n".join(lines)


LAYERS = OptionInfo("a list of layer numbers, or a slice such as '0:6' or '3::4'", None, "the layers it acts in")


def describe(scheme: type[Scheme]) -> SchemeInfo:
    """Read a scheme's name, summary, paper and options off its class."""
    hints = typing.get_type_hints(scheme.Options)
    options = {
        field.name: OptionInfo(spell(hints[field.name]), field.metadata["default"], field.metadata["doc"])
        for field in dataclasses.fields(scheme.Options)
    }
    if not scheme.at_input:
        options["layers"] = LAYERS
    summary = (scheme.__doc__ or "").strip().splitlines()[0]
    facts = (scheme.name, summary, scheme.paper, scheme.kind, scheme.formula, scheme.cost, scheme.neutral)
    return SchemeInfo(*facts, scheme.extends, options)
