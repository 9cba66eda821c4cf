"""Pictures of what `hf_posenc.analysis` measures. Every function takes its data and returns a matplotlib figure.

Needs matplotlib: pip install hf_posenc[plots]
"""

from __future__ import annotations

from .attention import attention, frequencies
from .distances import bias, decay, relative
from .mixing import clouds, separation
from .style import check_figure_path, save_figure
from .tables import encoding, movement

__all__ = [
    "attention",
    "bias",
    "check_figure_path",
    "clouds",
    "decay",
    "encoding",
    "frequencies",
    "movement",
    "relative",
    "save_figure",
    "separation",
]
