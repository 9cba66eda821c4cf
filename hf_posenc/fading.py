"""A part of what a scheme does: how the result of each of its seams is weakened while encodings are handed over."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from .terms import DistanceBias, DistanceRows, KeyTerm, QueryTerm, Separable, Term


def faded(seam: str, found: Any, args: tuple[Any, ...], strength: float) -> Any:
    """What a seam gives under a strength: nothing at 0, all of it at 1."""
    if seam in ("embed", "rotate"):
        before = args[0]
        return found if found is before else before + strength * (found - before)
    if seam == "score":
        terms = found if isinstance(found, list) else [found]
        return [faded_term(term, strength) for term in terms]
    if seam == "content_scale":
        return 1 + strength * (found - 1)
    if seam == "value":
        return _rows(found, strength)
    return found


def faded_term(term: Term, strength: float) -> Term:
    """A term times a number, in the form that it has."""
    if isinstance(term, DistanceBias):
        return DistanceBias(strength * term.values)
    if isinstance(term, (QueryTerm, KeyTerm)):
        return type(term)(_rows(term.of, strength))
    if isinstance(term, Separable):
        return Separable(strength * term.queries, term.keys)
    assert isinstance(term, torch.Tensor)
    return strength * term


def _rows(rows: DistanceRows, strength: float) -> DistanceRows:
    return dataclasses.replace(rows, rows_HRD=strength * rows.rows_HRD)
