"""The rows of the matrix: every scheme has at least one, and a test sees to that."""

from __future__ import annotations

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class Case:
    """A `position_scheme` that every check of the matrix is run on, for every architecture."""

    id: str
    scheme: Any
    extends: bool = True
    scores: bool = False
    """Adds a score term, so that backends without one must refuse."""


CASES = [
    Case("learned", "learned", extends=False),
    Case("window", {"type": "window", "window_size": 5}),
    Case("sinusoidal", "sinusoidal"),
    Case("rope", "rope"),
    Case("rope-partial", {"type": "rope", "theta": 500.0, "layout": "interleaved", "partial_rotary_factor": 0.5}),
    Case("rope-yarn", {"type": "rope", "scaling": {"rope_type": "yarn", "factor": 4.0}}),
    Case("xpos", {"type": "xpos", "scale_base": 2000}),
    Case("alibi", "alibi", scores=True),
    Case("alibi-learned", {"type": "alibi", "learned": True}, scores=True),
    Case("t5", {"type": "t5", "num_buckets": 8, "max_distance": 20}, scores=True),
    Case("t5-per-layer", {"type": "t5", "num_buckets": 8, "max_distance": 20, "shared": False}, scores=True),
    Case("kerple", "kerple", scores=True),
    Case("kerple-power", {"type": "kerple", "kind": "power"}, scores=True),
    Case("fire", "fire", scores=True),
    Case("fire+alibi", ["fire", "alibi"], scores=True),
    Case("sandwich", "sandwich", scores=True),
    Case("none", "none"),
    Case("learned+t5", ["learned", {"type": "t5", "num_buckets": 8, "max_distance": 20}], extends=False, scores=True),
    Case("sinusoidal+rope+alibi", ["sinusoidal", "rope", "alibi"], scores=True),
    Case("alternating", [{"type": "rope", "layers": "0::2"}, {"type": "alibi", "layers": [1]}], scores=True),
]
ARCHITECTURES = ["bert", "bert-decoder", "gpt2", "llama"]
DECODERS = ["bert-decoder", "gpt2", "llama"]
