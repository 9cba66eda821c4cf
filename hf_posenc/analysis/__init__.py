"""Measure what position encodings do, for a scheme alone or in a model. `hf_posenc.plots` draws the results."""

from __future__ import annotations

from .distance import (
    AttentionByDistance,
    BiasByDistance,
    RelativeBuckets,
    attention_by_distance,
    bias_by_distance,
    relative_buckets,
)
from .embeddings import (
    PositionEmbeddings,
    Separability,
    TokenClusters,
    position_embeddings,
    separability,
    token_clusters,
)
from .loading import build_model, load_model, tokenize_file
from .rotary import NoRotationError, RotaryDecay, RotaryFrequencies, rotary_decay, rotary_frequencies

__all__ = [
    "AttentionByDistance",
    "BiasByDistance",
    "NoRotationError",
    "PositionEmbeddings",
    "RelativeBuckets",
    "RotaryDecay",
    "RotaryFrequencies",
    "Separability",
    "TokenClusters",
    "attention_by_distance",
    "bias_by_distance",
    "build_model",
    "load_model",
    "position_embeddings",
    "relative_buckets",
    "rotary_decay",
    "rotary_frequencies",
    "separability",
    "token_clusters",
    "tokenize_file",
]
