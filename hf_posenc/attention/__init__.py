"""Attention under position schemes: where tokens stand, what is added to the logits, and the cheapest exact path."""

from __future__ import annotations

from .cache import annotate_caches, self_attention_cache
from .dense import materialize
from .dispatch import AttentionPath, DispatchKey, MaskKind, select_path
from .function import (
    ActiveScheme,
    LayerSchemes,
    Projections,
    ProjectionsDone,
    apply_rotation,
    check_backend,
    far_rotation,
    scale_content,
    score_terms,
)
from .masks import Window, visible_pairs
from .positions import PositionNeeds, ResolvedPositions, resolve_positions, token_like

__all__ = [
    "ActiveScheme",
    "AttentionPath",
    "DispatchKey",
    "LayerSchemes",
    "MaskKind",
    "PositionNeeds",
    "Projections",
    "ProjectionsDone",
    "ResolvedPositions",
    "Window",
    "annotate_caches",
    "apply_rotation",
    "check_backend",
    "far_rotation",
    "materialize",
    "resolve_positions",
    "scale_content",
    "score_terms",
    "select_path",
    "self_attention_cache",
    "token_like",
    "visible_pairs",
]
