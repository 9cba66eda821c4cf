"""Position schemes, and the API for writing new ones."""

from __future__ import annotations

from .base import Kind, LayerModule, LayerParameters, LayerParams, ModelShape, Scheme
from .functional import extended_rows
from .inputs import Content, LayerSeams, Positions, is_tracing, repeat_key_heads
from .mixing import InputScheme, MixOptions
from .options import Options, describe_type, option
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
    "LayerSeams",
    "MixOptions",
    "ModelShape",
    "Options",
    "Positions",
    "QueryTerm",
    "Scheme",
    "Separable",
    "Term",
    "describe_type",
    "extended_rows",
    "is_tracing",
    "option",
    "repeat_key_heads",
]
