"""The grammar of `position_scheme`: a name, a dict or a list of them, parsed into scheme classes and options."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Sequence
from typing import Any, TypeAlias

from .errors import PosEncError
from .registry import SCHEMES
from .schemes import ModelShape, Options, Scheme
from .schemes.base import LAYER_SEAMS
from .schemes.other_names import OTHER_NAMES
from .validation import MAX_LAYERS, MAX_SCHEMES, check_json_limits, did_you_mean, truncate_repr

PositionScheme: TypeAlias = str | dict[str, Any] | list[str | dict[str, Any]]
"""The value of `position_scheme`: `"rope"`, `{"type": "t5", "num_buckets": 64}`, or a list of these."""
LAYER_SLICE = re.compile(r"(-?\d{1,9})?:(-?\d{1,9})?(?::(\d{1,9})?)?")
LAYER_TYPES = ("full_attention", "sliding_attention")
"""Names in the `layer_types` of a config that `layers` accepts too."""
LAYER_KEYS = ("layers", "except_layers")
COMMON_KEYS = ("type", *LAYER_KEYS)
NO_POSITIONS = "none"
LayerSelection: TypeAlias = list[int] | str
"""Layer indices, a slice such as "3::4", or a layer type such as "full_attention"."""


@dataclasses.dataclass(frozen=True)
class SchemeSpec:
    """One scheme of a `position_scheme`: parsed and validated, but not yet built for a model."""

    scheme: type[Scheme]
    options: Options
    layers: LayerSelection | None
    except_layers: LayerSelection | None = None

    @property
    def selects_layers(self) -> bool:
        """Whether it names the layers in which it acts, or those in which it does not."""
        return self.layers is not None or self.except_layers is not None

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

    def active_layers(self, num_layers: int, layer_types: Sequence[str] | None = None) -> tuple[int, ...]:
        """The layers in which the scheme acts, in ascending order; none for schemes of the input embedding.

        Raises:
            PosEncError: If `layers` or `except_layers` names a layer that the model does not have, or no layer is left.
        """
        if self.scheme.at_input:
            return ()
        layers = self._select("layers", self.layers, num_layers, layer_types)
        excluded = self._select("except_layers", self.except_layers, num_layers, layer_types)
        if self.except_layers is None:
            return layers
        remaining = tuple(layer for layer in layers if layer not in excluded)
        if not remaining:
            raise PosEncError(f"{self.name}: except_layers={self.except_layers!r} leaves none of the layers")
        return remaining

    def _select(
        self, key: str, selection: LayerSelection | None, num_layers: int, layer_types: Sequence[str] | None
    ) -> tuple[int, ...]:
        """The layers that a selection means; all of them for None."""
        if selection is None:
            return tuple(range(num_layers))
        if selection in LAYER_TYPES:
            selected = tuple(layer for layer, name in enumerate(layer_types or ()) if name == selection)
            if not selected:
                raise PosEncError(
                    f"{self.name}: {key}={selection!r}, but the model has no layers of this type: name them by index, "
                    'as in [0, 1] or "0::2"'
                )
            return selected
        if isinstance(selection, str):
            match = LAYER_SLICE.fullmatch(selection)
            assert match is not None
            bounds = [None if bound is None else int(bound) for bound in match.groups()]
            selected = tuple(range(num_layers))[slice(*bounds)]
            if not selected:
                raise PosEncError(f"{self.name}: {key}={selection!r} selects none of the {num_layers} layers")
            return selected
        out_of_range = [layer for layer in selection if layer >= num_layers]
        if out_of_range:
            raise PosEncError(
                f"{self.name}: {key} has no layer {out_of_range[0]}; the model has layers 0 to {num_layers - 1}"
            )
        return tuple(sorted(set(selection)))

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
    specs = tuple(_parse_item(item) for item in position_scheme)
    _check_no_positions(specs)
    return specs


def assign_layers(
    specs: tuple[SchemeSpec, ...], num_layers: int, stock_scheme: str, layer_types: Sequence[str] | None = None
) -> tuple[tuple[SchemeSpec, ...], list[tuple[int, ...]]]:
    """Decide which schemes act in which layers of a model.

    `none` with `layers` takes the other schemes out of these layers. Without other schemes, the model's own encoding,
    `stock_scheme`, stays in the remaining layers: its spec is appended.

    Returns:
        The specs, and for each of them its layers, in ascending order.

    Raises:
        PosEncError: If `layers` does not fit the model, a scheme is left without layers, or the model's own encoding
            cannot be confined to some layers.
    """
    layers = [spec.active_layers(num_layers, layer_types) for spec in specs]
    without = {
        layer for spec, active in zip(specs, layers, strict=True) if spec.name == NO_POSITIONS for layer in active
    }
    is_alone = all(spec.name == NO_POSITIONS for spec in specs)
    if is_alone and len(without) < num_layers:
        scheme = SCHEMES[stock_scheme]
        if scheme.at_input:
            raise PosEncError(
                "none: without other schemes, layers and except_layers are refused here: the model's own encoding "
                f"({stock_scheme}) is added to the input embedding and reaches every layer. List a scheme that acts in "
                'layers, such as ["rope", {"type": "none", "layers": ...}]'
            )
        specs, layers = (*specs, SchemeSpec(scheme, scheme.Options(), None)), [*layers, tuple(range(num_layers))]
    for index, spec in enumerate(specs):
        if spec.name == NO_POSITIONS or spec.scheme.at_input:
            continue
        layers[index] = tuple(layer for layer in layers[index] if layer not in without)
        if not layers[index]:
            raise PosEncError(f"{spec.name} has no layers left: none is listed with all the layers that it acts in")
    return specs, layers


def _check_no_positions(specs: tuple[SchemeSpec, ...]) -> None:
    """Refuse lists in which `none` contradicts another scheme."""
    nones = [spec for spec in specs if spec.name == NO_POSITIONS]
    if not nones or len(specs) == 1:
        return
    others = [spec for spec in specs if spec.name != NO_POSITIONS]
    if any(not spec.selects_layers for spec in nones):
        raise PosEncError(
            "position_scheme lists none, which means no positions in any layer, with other schemes. Give it the layers "
            'without positions, as in ["rope", {"type": "none", "layers": "3::4"}], or list it alone'
        )
    at_input = next((spec.name for spec in others if spec.acts_at("embed")), None)
    if at_input is not None:
        raise PosEncError(
            f"none: layers cannot be combined with {at_input}, which changes the input embedding and so reaches every "
            "layer. To keep another scheme out of some layers, give that scheme except_layers"
        )


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
        raise PosEncError(f"position_scheme: unknown type {truncate_repr(name)}{_other_name(name)}")
    values = {key: value for key, value in item.items() if key not in COMMON_KEYS}
    option_names = [field.name for field in dataclasses.fields(scheme.Options)]
    for key in values:
        if key not in option_names:
            valid = [*option_names, *(COMMON_KEYS[:1] if scheme.at_input else COMMON_KEYS)]
            raise PosEncError(f"{scheme.name}: unknown option {truncate_repr(key)}{did_you_mean(key, valid)}")
    try:
        options = scheme.Options(**values)
    except ValueError as error:
        raise PosEncError(f"{scheme.name}: {error}") from None
    layers, except_layers = (_check_layers(scheme, key, item.get(key)) for key in LAYER_KEYS)
    return SchemeSpec(scheme, options, layers, except_layers)


def _check_layers(scheme: type[Scheme], key: str, layers: object) -> LayerSelection | None:
    if layers is None:
        return None
    if scheme.at_input:
        raise PosEncError(f"{scheme.name} acts at the input embedding, where {key} has no meaning; remove it")
    if isinstance(layers, str):
        if layers in LAYER_TYPES:
            return layers
        match = LAYER_SLICE.fullmatch(layers)
        if match and int(match[3] or 1) > 0:
            return layers
    elif isinstance(layers, (list, tuple)) and 0 < len(layers) <= MAX_LAYERS and all(map(_is_layer_index, layers)):
        return list(layers)
    raise PosEncError(
        f'{scheme.name}: {key} must be a list of layer indices from 0, a slice such as "0:6" or "3::4", or '
        f"{' or '.join(LAYER_TYPES)}; got {truncate_repr(layers)}"
    )


def _is_layer_index(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _other_name(name: object) -> str:
    """The end of an error message about an unknown scheme: how it is spelled here, if another package has the name."""
    spelled = name.lower().replace("-", "_") if isinstance(name, str) else ""
    known = f'"{spelled}"' if spelled in SCHEMES else OTHER_NAMES.get(spelled)
    return did_you_mean(name, SCHEMES) if known is None else f"; write {known}"
