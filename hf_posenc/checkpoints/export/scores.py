"""Variants with one scheme inside attention, the same in all layers."""

from __future__ import annotations

from typing import Any

from ...schemes.base import LAYER_SEAMS, STOCK_ROTATION
from .variant import NoStockEqual, Variant


def score_scheme(variant: Variant, name: str) -> tuple[int, Any]:
    """The only scheme inside attention, and its index in `position_scheme`.

    Raises:
        NoStockEqual: Unless it has this name and acts in all layers.
    """
    seams = (*LAYER_SEAMS, STOCK_ROTATION)
    by_layer = [{index for seam in seams for index in active[seam]} for active in variant.plan.state.active]
    acting = sorted(set().union(*by_layer))
    if len(acting) != 1:
        raise NoStockEqual("several schemes act inside attention" if acting else "no scheme acts inside attention")
    scheme = variant.schemes[acting[0]]
    if scheme.name != name:
        raise NoStockEqual(f"{scheme.name} acts inside attention, not {name}")
    if not all(by_layer):
        raise NoStockEqual(f"{name} acts in some layers only")
    return acting[0], scheme
