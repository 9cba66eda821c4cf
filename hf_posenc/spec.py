"""The grammar of `position_scheme`: a name, a dict or a list of them, parsed into scheme classes and options."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import re
from collections.abc import Iterable
from typing import Any, TypeAlias

from .errors import PosEncError
from .registry import SCHEMES
from .schemes import ModelShape, Options, Scheme
from .schemes.base import LAYER_SEAMS
from .validation import MAX_LAYERS, MAX_SCHEMES, check_json_limits, truncate_repr

PositionScheme: TypeAlias = str | dict[str, Any] | list[str | dict[str, Any]]
"""The value of `position_scheme`: `"rope"`, `{"type": "t5", "num_buckets": 64}`, or a list of these."""
LAYER_SLICE = re.compile(r"(-?\d{1,9})?:(-?\d{1,9})?(?::(\d{1,9})?)?")
COMMON_KEYS = ("type", "layers")


@dataclasses.dataclass(frozen=True)
class SchemeSpec:
    """One scheme of a `position_scheme`: parsed and validated, but not yet built for a model."""

    scheme: type[Scheme]
    options: Options
    layers: list[int] | str | None

    @property
    def name(self) -> str:
        return self.scheme.name

    @functools.cached_property
    def seams(self) -> frozenset[str]:
        """The seams (`embed`, `rotate`, `score`, `content_scale`, `value`) at which it acts under its options."""
        return frozenset(seam for seam in (*LAYER_SEAMS, "embed") if self.scheme.acts(seam, self.options))

    def acts_at(self, seam: str) -> bool:
        """Whether the scheme acts at a seam under its options."""
        return seam in self.seams

    def active_layers(self, num_layers: int) -> tuple[int, ...]:
        """The layers in which the scheme acts.

        Args:
            num_layers: The model's number of layers.

        Returns:
            Layer indices in ascending order; empty for schemes of the input embedding.

        Raises:
            PosEncError: If `layers` names a layer that the model does not have.
        """
        if self.scheme.at_input:
            return ()
        if self.layers is None:
            return tuple(range(num_layers))
        if isinstance(self.layers, str):
            match = LAYER_SLICE.fullmatch(self.layers)
            assert match is not None
            bounds = [None if bound is None else int(bound) for bound in match.groups()]
            selected = tuple(range(num_layers))[slice(*bounds)]
            if not selected:
                raise PosEncError(f"{self.name}: layers={self.layers!r} selects none of the {num_layers} layers")
            return selected
        out_of_range = [layer for layer in self.layers if layer >= num_layers]
        if out_of_range:
            raise PosEncError(f"{self.name}: no layer {out_of_range[0]}; the model has layers 0 to {num_layers - 1}")
        return tuple(sorted(set(self.layers)))

    def build(self, shape: ModelShape) -> Scheme:
        """Build the scheme's module for a model of this shape."""
        return self.scheme(self.options, shape)


def parse_position_scheme(position_scheme: object) -> tuple[SchemeSpec, ...]:
    """Parse and validate a `position_scheme`.

    Args:
        position_scheme: A scheme name, a dict with a `type` and options, or a list of these.

    Returns:
        One spec per scheme, in order.

    Raises:
        PosEncError: If anything is unknown or out of range; the message names the key and the accepted values.

    Example:
        >>> [spec.name for spec in parse_position_scheme(["learned", {"type": "t5", "num_buckets": 64}])]
        ['learned', 't5']
    """
    check_json_limits(position_scheme)
    if not isinstance(position_scheme, (list, tuple)):
        return (_parse_item(position_scheme),)
    if len(position_scheme) > MAX_SCHEMES:
        raise PosEncError(f"position_scheme lists {len(position_scheme):,} schemes; at most {MAX_SCHEMES} are accepted")
    if not position_scheme:
        raise PosEncError('position_scheme is an empty list; use "none" for a model without positions')
    return tuple(_parse_item(item) for item in position_scheme)


def _parse_item(item: object) -> SchemeSpec:
    if isinstance(item, str):
        item = {"type": item}
    if not isinstance(item, dict):
        raise PosEncError(
            "position_scheme must be a name, a dict with a type, or a list of these; "
            f"got {truncate_repr(item)} of type {type(item).__name__}"
        )
    if "type" not in item:
        raise PosEncError(f"position_scheme: {truncate_repr(item)} has no type; expected one of {sorted(SCHEMES)}")
    name = item["type"]
    scheme = SCHEMES.get(name) if isinstance(name, str) else None
    if scheme is None:
        raise PosEncError(f"position_scheme: unknown type {truncate_repr(name)}{_did_you_mean(name, SCHEMES)}")
    values = {key: value for key, value in item.items() if key not in COMMON_KEYS}
    option_names = [field.name for field in dataclasses.fields(scheme.Options)]
    for key in values:
        if key not in option_names:
            valid = [*option_names, *(COMMON_KEYS[:1] if scheme.at_input else COMMON_KEYS)]
            raise PosEncError(f"{scheme.name}: unknown option {truncate_repr(key)}{_did_you_mean(key, valid)}")
    try:
        options = scheme.Options(**values)
    except ValueError as error:
        raise PosEncError(f"{scheme.name}: {error}") from None
    return SchemeSpec(scheme, options, _check_layers(scheme, item.get("layers")))


def _check_layers(scheme: type[Scheme], layers: object) -> list[int] | str | None:
    if layers is None:
        return None
    if scheme.at_input:
        raise PosEncError(f"{scheme.name} acts at the input embedding, where layers has no meaning; remove it")
    if isinstance(layers, str):
        match = LAYER_SLICE.fullmatch(layers)
        if match and int(match[3] or 1) > 0:
            return layers
    elif isinstance(layers, (list, tuple)) and 0 < len(layers) <= MAX_LAYERS and all(map(_is_layer_index, layers)):
        return list(layers)
    raise PosEncError(
        f'{scheme.name}: layers must be a list of layer indices from 0, or a slice such as "0:6" or "3::4"; '
        f"got {truncate_repr(layers)}"
    )


def _is_layer_index(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _did_you_mean(name: object, valid: Iterable[str]) -> str:
    """The end of an error message: the closest valid name, if any is close, and all of them."""
    names = sorted(valid)
    close = difflib.get_close_matches(truncate_repr(name).strip("'")[:80], names, n=1, cutoff=0.5)
    hint = f" (did you mean {close[0]!r}?)" if close else ""
    return f"{hint}; expected one of {names}"
