"""The grammar of `position_scheme`: a name, a dict or a list of them, read into scheme classes and their options."""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Iterable
from typing import Any

from .registry import SCHEMES
from .schemes.base import ModelShape, Scheme
from .schemes.options import Options
from .validation import MAX_LAYERS, MAX_SCHEMES, check_json_limits, truncate_repr

SLICE = re.compile(r"(-?\d{1,9})?:(-?\d{1,9})?(?::(\d{1,9})?)?")
COMMON_KEYS = ("type", "layers")


@dataclasses.dataclass(frozen=True)
class SchemeSpec:
    """One scheme of a `position_scheme`, read and checked but not built: it knows no model yet."""

    scheme: type[Scheme]
    options: Options
    layers: list[int] | str | None

    @property
    def name(self) -> str:
        return self.scheme.name

    def acts_at(self, seam: str) -> bool:
        return self.scheme.acts(seam, self.options)

    def active_layers(self, num_layers: int) -> tuple[int, ...]:
        """The layers that the scheme acts in, of a model with `num_layers`."""
        if self.scheme.at_input:
            return ()
        if self.layers is None:
            return tuple(range(num_layers))
        if isinstance(self.layers, str):
            match = SLICE.fullmatch(self.layers)
            assert match is not None
            chosen = tuple(range(num_layers))[slice(*[None if part is None else int(part) for part in match.groups()])]
            if not chosen:
                raise ValueError(f"{self.scheme.name}: layers={self.layers!r} names none of the {num_layers} layers")
            return chosen
        beyond = [layer for layer in self.layers if layer >= num_layers]
        if beyond:
            raise ValueError(
                f"{self.scheme.name}: layers names layer {beyond[0]}, but the model has layers 0 to {num_layers - 1}"
            )
        return tuple(sorted(set(self.layers)))

    def build(self, shape: ModelShape) -> Scheme:
        return self.scheme(self.options, shape)


def parse_position_scheme(position_scheme: Any) -> tuple[SchemeSpec, ...]:
    """Read a `position_scheme`. Whatever is wrong is a ValueError that names the key and what it could be."""
    check_json_limits(position_scheme)
    if isinstance(position_scheme, (list, tuple)):
        if len(position_scheme) > MAX_SCHEMES:
            raise ValueError(f"position_scheme lists {len(position_scheme):,} schemes, and may list {MAX_SCHEMES}")
        if not position_scheme:
            raise ValueError('position_scheme is an empty list; for no position signal at all, say "none"')
        return tuple(_parse_item(item) for item in position_scheme)
    return (_parse_item(position_scheme),)


def _parse_item(item: Any) -> SchemeSpec:
    if isinstance(item, str):
        item = {"type": item}
    if not isinstance(item, dict):
        raise ValueError(
            "position_scheme is a name, a dict with a type, or a list of them; "
            f"got {truncate_repr(item)} of type {type(item).__name__}"
        )
    if "type" not in item:
        raise ValueError(f"position_scheme: {truncate_repr(item)} has no type; it is one of {sorted(SCHEMES)}")
    scheme = SCHEMES.get(item["type"]) if isinstance(item["type"], str) else None
    if scheme is None:
        raise ValueError(
            f"position_scheme: unknown type {truncate_repr(item['type'])}{did_you_mean(item['type'], SCHEMES)}"
        )
    options = {key: value for key, value in item.items() if key not in COMMON_KEYS}
    known = [field.name for field in dataclasses.fields(scheme.Options)]
    for key in options:
        if key not in known:
            common = ["type"] if scheme.at_input else COMMON_KEYS
            raise ValueError(
                f"{scheme.name}: unknown option {truncate_repr(key)}{did_you_mean(key, [*known, *common])}"
            )
    try:
        built = scheme.Options(**options)
    except ValueError as error:
        raise ValueError(f"{scheme.name}: {error}") from None
    return SchemeSpec(scheme, built, _check_layers(scheme, item.get("layers")))


def _check_layers(scheme: type[Scheme], layers: Any) -> list[int] | str | None:
    if layers is None:
        return None
    if scheme.at_input:
        raise ValueError(f"{scheme.name}: layers means nothing at the input embedding; leave it out")
    if isinstance(layers, str):
        match = SLICE.fullmatch(layers)
        if match and int(match[3] or 1) > 0:
            return layers
    elif isinstance(layers, (list, tuple)) and 0 < len(layers) <= MAX_LAYERS and all(map(_is_layer, layers)):
        return list(layers)
    raise ValueError(
        f'{scheme.name}: layers is a list of layer numbers from 0, or a slice such as "0:6" or "3::4"; '
        f"got {truncate_repr(layers)}"
    )


def _is_layer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def did_you_mean(wrong: Any, valid: Iterable[str]) -> str:
    """The end of an error message: the nearest valid name, if one is near, and all of them."""
    names = sorted(valid)
    close = difflib.get_close_matches(truncate_repr(wrong).strip("'")[:80], names, n=1, cutoff=0.5)
    hint = f" (did you mean {close[0]!r}?)" if close else ""
    return f"{hint}; it is one of {names}"
