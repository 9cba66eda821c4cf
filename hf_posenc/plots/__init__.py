"""Figures of what `hf_posenc.analysis` measures: each function draws the results of the analysis of the same name.

Needs matplotlib: pip install hf_posenc[plots]
"""

from __future__ import annotations

from .attention import attention_by_distance, bias_by_distance, relative_buckets, rotary_decay, rotary_frequencies
from .embeddings import feature_ranges, position_embeddings, separability, token_clusters
from .style import check_figure_path, save_figure

__all__ = ["attention_by_distance", "bias_by_distance", "relative_buckets", "rotary_decay", "rotary_frequencies"]
__all__ += ["feature_ranges", "position_embeddings", "separability", "token_clusters"]
__all__ += ["check_figure_path", "save_figure"]
