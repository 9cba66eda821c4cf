"""Measure what position encodings do, for a scheme alone or in a model. `hf_posenc.plots` draws the results."""

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
from .inspection import build_model, load_model, tokenize_file
from .rotary import NoRotationError, RotaryDecay, RotaryFrequencies, rotary_decay, rotary_frequencies

__all__ = ["build_model", "load_model", "tokenize_file"]
__all__ += ["AttentionByDistance", "BiasByDistance", "RelativeBuckets"]
__all__ += ["attention_by_distance", "bias_by_distance", "relative_buckets"]
__all__ += ["PositionEmbeddings", "Separability", "TokenClusters"]
__all__ += ["position_embeddings", "separability", "token_clusters"]
__all__ += ["NoRotationError", "RotaryDecay", "RotaryFrequencies", "rotary_decay", "rotary_frequencies"]
