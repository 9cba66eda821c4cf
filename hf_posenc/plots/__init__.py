"""Pictures of what `hf_posenc.analysis` measures. Every function takes its data and returns a matplotlib figure.

Needs matplotlib: pip install hf_posenc[plots]
"""

from __future__ import annotations

from .attention import attention, frequencies
from .distances import bias, decay, relative
from .drawing import refuse_format, save
from .mixing import clouds, separation
from .tables import encoding, movement

__all__ = [
    "attention",
    "bias",
    "clouds",
    "decay",
    "encoding",
    "frequencies",
    "movement",
    "refuse_format",
    "relative",
    "save",
    "separation",
]
