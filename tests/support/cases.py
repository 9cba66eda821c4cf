"""The rows of the matrix: every scheme has at least one, and a test sees to that."""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Callable
from typing import Any

import pytest


@dataclasses.dataclass(frozen=True)
class Case:
    """A `position_scheme` that every check of the matrix is run on, for every architecture."""

    id: str
    scheme: Any
    extends: bool = True
    scores: bool = False
    """Adds a score term, so that backends without one must refuse."""
    values: bool = False
    """Adds a value term, so that flex_attention must refuse too."""
    causal: bool = False
    """Has no meaning where queries see ahead."""
    contextual: bool = False
    """Takes no notice of position_ids: it counts for itself."""
    sampled: bool = False
    """Another form of a case that is there: `make test` takes it on one architecture, `make test-all` on all."""
    settles: bool = False
    """Far past the trained length, neighbouring positions are hardly told apart any more."""


DEBERTA_V1 = {"type": "deberta", "max_distance": 5, "share_projections": False, "norm": None}
T5 = {"type": "t5", "num_buckets": 8, "max_distance": 20}
CASES = [
    Case("learned", "learned", extends=False),
    Case("window", {"type": "window", "window_size": 5}),
    Case("sinusoidal", "sinusoidal"),
    Case("sinusoidal-concat", {"type": "sinusoidal", "mix": "concat", "position_size": 10}, sampled=True),
    Case("sinusoidal-context", {"type": "sinusoidal", "mix": "attention", "query": "context"}),
    Case("polynomial", "polynomial", settles=True),
    Case("polynomial-concat", {"type": "polynomial", "degree": 5, "mix": "concat"}, settles=True, sampled=True),
    Case("exponential", "exponential", settles=True),
    Case("exponential-attention", {"type": "exponential", "rates": 4, "mix": "attention"}, settles=True, sampled=True),
    Case("learned-concat", {"type": "learned", "mix": "concat"}, extends=False, sampled=True),
    Case("learned-attention", {"type": "learned", "mix": "attention"}, extends=False, sampled=True),
    Case("window-context", {"type": "window", "window_size": 5, "mix": "attention", "query": "context"}),
    Case("rope", "rope"),
    Case("rope-partial", {"type": "rope", "theta": 500.0, "layout": "interleaved", "partial_rotary_factor": 0.5}),
    Case("rope-yarn", {"type": "rope", "scaling": {"rope_type": "yarn", "factor": 4.0}}, sampled=True),
    Case("xpos", {"type": "xpos", "scale_base": 2000}),
    Case("alibi", "alibi", scores=True),
    Case("alibi-learned", {"type": "alibi", "learned": True}, scores=True, sampled=True),
    Case("t5", T5, scores=True),
    Case("t5-per-layer", {**T5, "shared": False}, scores=True, sampled=True),
    Case("kerple", "kerple", scores=True),
    Case("kerple-power", {"type": "kerple", "kind": "power"}, scores=True, sampled=True),
    Case("fire", "fire", scores=True),
    Case("fire+alibi", ["fire", "alibi"], scores=True, sampled=True),
    Case("sandwich", "sandwich", scores=True),
    Case("shaw", {"type": "shaw", "max_distance": 4}, scores=True, values=True),
    Case(
        "shaw-keys", {"type": "shaw", "max_distance": 4, "values": False, "query_term": True}, scores=True, sampled=True
    ),
    Case("transformer_xl", "transformer_xl", scores=True),
    Case("transformer_xl-shared", {"type": "transformer_xl", "shared_bias": True}, scores=True, sampled=True),
    Case("tupe", {"type": "tupe", "num_buckets": 8, "max_distance": 20}, extends=False, scores=True),
    Case(
        "tupe-untied", {"type": "tupe", "relative": False, "untie_cls": True}, extends=False, scores=True, sampled=True
    ),
    Case("deberta", {"type": "deberta", "max_distance": 24, "buckets": 6}, scores=True),
    Case("deberta-v1", DEBERTA_V1, scores=True, sampled=True),
    Case("cope", {"type": "cope", "max_positions": 6}, scores=True, causal=True, contextual=True),
    Case("none", "none"),
    Case("learned+t5", ["learned", T5], extends=False, scores=True),
    Case("sinusoidal+rope+alibi", ["sinusoidal", "rope", "alibi"], scores=True),
    Case(
        "learned+sinusoidal-concat", ["learned", {"type": "sinusoidal", "mix": "concat"}], extends=False, sampled=True
    ),
    Case("rope+shaw", ["rope", {"type": "shaw", "max_distance": 4}], scores=True, values=True, sampled=True),
    Case(
        "tupe+deberta",
        ["tupe", {"type": "deberta", "max_distance": 5, "terms": ["p2c"]}],
        extends=False,
        scores=True,
        sampled=True,
    ),
    Case("rope-but-every-third", {"type": "rope", "layers": "0:2"}, sampled=True),
    Case("xl-and-t5", [{"type": "transformer_xl", "layers": [0, 2]}, {**T5, "layers": [1]}], scores=True, sampled=True),
    Case("alternating", [{"type": "rope", "layers": "0::2"}, {"type": "alibi", "layers": [1]}], scores=True),
]
ARCHITECTURES = ["bert", "bert-decoder", "gpt2", "llama"]
DECODERS = ["bert-decoder", "gpt2", "llama"]


def pairs(architectures: list[str], cases: list[Case] | None = None) -> Callable[[Any], Any]:
    """Parametrises a test with `case` and `architecture`: every case that means something on an architecture.

    `make test` takes two architectures of each case, or one; which ones goes by the test's name, so that all pairs are
    met in some tests. `make test-all` takes all.
    """

    def decorate(test: Any) -> Any:
        turn = zlib.crc32(test.__name__.encode())
        rows = []
        for case in cases or CASES:
            meaningful = [name for name in architectures if not (case.causal and name == "bert")]
            first = (CASES.index(case) + turn) % len(meaningful)
            kept = [meaningful[(first + step) % len(meaningful)] for step in range(1 if case.sampled else 2)]
            for architecture in meaningful:
                marks = [] if architecture in kept else [pytest.mark.slow]
                rows.append(pytest.param(case, architecture, id=f"{architecture}-{case.id}", marks=marks))
        return pytest.mark.parametrize(("case", "architecture"), rows)(test)

    return decorate
