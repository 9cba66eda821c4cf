"""Figures of what `hf_posenc.analysis` measures: each function draws the results of the analysis of the same name.

Needs matplotlib, which the extra `plots` installs.
"""

from .analysis import (
    attention_by_distance,
    bias_by_distance,
    feature_ranges,
    position_embeddings,
    relative_buckets,
    rotary_decay,
    rotary_frequencies,
    separability,
    token_clusters,
)
from .style import save_figure

__all__ = ["attention_by_distance", "bias_by_distance", "relative_buckets", "rotary_decay", "rotary_frequencies"]
__all__ += ["feature_ranges", "position_embeddings", "save_figure", "separability", "token_clusters"]
