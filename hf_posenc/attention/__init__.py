"""Attention under position schemes: where tokens stand, what is added to the logits, and the cheapest exact path."""

from __future__ import annotations

from .active_schemes import ActiveScheme
from .cache import annotate_caches, keep_length_for_masks, self_attention_cache
from .dense import materialize
from .dispatch import (
    AttentionPath,
    DispatchKey,
    MaskKind,
    flex_min_scores,
    has_dense_terms,
    runs_flex_kernels,
    select_path,
)
from .function import (
    LayerSchemes,
    Projections,
    ProjectionsDone,
    apply_rotation,
    check_backend,
    check_direction,
    far_rotation,
    scale_content,
    score_terms,
)
from .gates import TokenGates, cache_layer
from .masks import Window, document_starts, visible_pairs
from .positions import PositionNeeds, ResolvedPositions, resolve_positions, token_like
from .sequence_parallel import check_sequence_parallel
from .tensor_parallel import ProcessRank, broadcast_parameters, find_local_heads
from .triton_support import triton_supports

__all__ = [
    "ActiveScheme",
    "AttentionPath",
    "DispatchKey",
    "LayerSchemes",
    "MaskKind",
    "PositionNeeds",
    "ProcessRank",
    "Projections",
    "ProjectionsDone",
    "ResolvedPositions",
    "TokenGates",
    "Window",
    "annotate_caches",
    "apply_rotation",
    "broadcast_parameters",
    "cache_layer",
    "check_backend",
    "check_direction",
    "check_sequence_parallel",
    "document_starts",
    "far_rotation",
    "find_local_heads",
    "flex_min_scores",
    "has_dense_terms",
    "keep_length_for_masks",
    "materialize",
    "resolve_positions",
    "runs_flex_kernels",
    "scale_content",
    "score_terms",
    "select_path",
    "self_attention_cache",
    "token_like",
    "triton_supports",
    "visible_pairs",
]
