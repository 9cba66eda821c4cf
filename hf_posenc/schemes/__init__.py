"""The position schemes, one file each, and what they are built from."""

from __future__ import annotations

from .base import Kind, LayerModule, LayerParameters, LayerParams, ModelShape, Scheme
from .functional import extended_rows
from .inputs import Content, Positions, is_tracing
from .mixing import InputScheme, MixOptions
from .options import Options, option
from .terms import DistanceBias, DistanceTable, KeyTerm, QueryTerm, Separable, Term

__all__ = [
    "Content",
    "DistanceBias",
    "DistanceTable",
    "InputScheme",
    "KeyTerm",
    "Kind",
    "LayerModule",
    "LayerParameters",
    "LayerParams",
    "MixOptions",
    "ModelShape",
    "Options",
    "Positions",
    "QueryTerm",
    "Scheme",
    "Separable",
    "Term",
    "extended_rows",
    "is_tracing",
    "option",
]
