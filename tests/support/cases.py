"""The rows of the test matrix. Every scheme has at least one; tests/test_package.py checks that."""

from __future__ import annotations

import dataclasses
import itertools
import zlib
from collections.abc import Callable
from typing import Any

import pytest


@dataclasses.dataclass(frozen=True)
class Case:
    """A `position_scheme` that every test of the matrix runs on every architecture."""

    id: str
    scheme: Any
    extends: bool = True
    """Runs past the trained length."""
    scores: bool = False
    """Adds a score term, so backends without one must refuse it."""
    values: bool = False
    """Adds a value term, so flex_attention must refuse it too."""
    remaps: bool = False
    """Rotates far keys apart from near ones, so flex_attention must refuse it too."""
    causal: bool = False
    """Defined for causal attention only."""
    contextual: bool = False
    """Computes positions from the content and ignores position_ids."""
    saturates: bool = False
    """Barely distinguishes neighboring positions far past the trained length."""


DEBERTA_V1 = {"type": "deberta", "max_distance": 5, "share_projections": False, "norm": None}
T5 = {"type": "t5", "num_buckets": 8, "max_distance": 20}
SELF_EXTEND = {"method": "self_extend", "window": 4, "group": 3}
REROPE = {"method": "rerope", "window": 4}
LEAKY_REROPE = {"method": "leaky_rerope", "window": 3, "k": 2.5}
DCA = {"method": "dca", "chunk_size": 5, "local_window": 2}
LLAMA4 = {"type": "temperature", "attn_scale": 0.7, "floor_scale": 3}
SSMAX = {"type": "temperature", "form": "ssmax"}
CABLE = {"type": "forget", "form": "cable", "init": "paper"}
CASES = [
    Case("learned", "learned", extends=False),
    Case("window", {"type": "window", "window_size": 5}),
    Case("sinusoidal", "sinusoidal"),
    Case("sinusoidal-concat", {"type": "sinusoidal", "mix": "concat", "position_size": 10}),
    Case("sinusoidal-context", {"type": "sinusoidal", "mix": "attention", "query": "context"}),
    Case("polynomial", "polynomial", saturates=True),
    Case("polynomial-concat", {"type": "polynomial", "degree": 5, "mix": "concat"}, saturates=True),
    Case("exponential", "exponential", saturates=True),
    Case("exponential-attention", {"type": "exponential", "rates": 4, "mix": "attention"}, saturates=True),
    Case("learned-concat", {"type": "learned", "mix": "concat"}, extends=False),
    Case("learned-attention", {"type": "learned", "mix": "attention"}, extends=False),
    Case("window-context", {"type": "window", "window_size": 5, "mix": "attention", "query": "context"}),
    Case("rope", "rope"),
    Case("rope-partial", {"type": "rope", "theta": 500.0, "layout": "interleaved", "partial_rotary_factor": 0.5}),
    Case("rope-yarn", {"type": "rope", "scaling": {"rope_type": "yarn", "factor": 4.0}}),
    Case("rope-self_extend", {"type": "rope", "extend": SELF_EXTEND}, causal=True, remaps=True),
    Case("rope-rerope", {"type": "rope", "extend": REROPE}, causal=True, remaps=True),
    Case("rope-leaky_rerope", {"type": "rope", "extend": LEAKY_REROPE}, causal=True, remaps=True),
    Case("rope-dca", {"type": "rope", "extend": DCA, "theta": 500.0}, causal=True, remaps=True),
    Case("xpos", {"type": "xpos", "scale_base": 2000}),
    Case("alibi", "alibi", scores=True),
    Case("alibi-learned", {"type": "alibi", "learned": True}, scores=True),
    Case("alibi-per-layer", {"type": "alibi", "learned": "per_layer"}, scores=True),
    Case("t5", T5, scores=True),
    Case("t5-per-layer", {**T5, "shared": False}, scores=True),
    Case("kerple", "kerple", scores=True),
    Case("kerple-power", {"type": "kerple", "kind": "power"}, scores=True),
    Case("fire", "fire", scores=True),
    Case("fire+alibi", ["fire", "alibi"], scores=True),
    Case("sandwich", "sandwich", scores=True),
    Case("shaw", {"type": "shaw", "max_distance": 4}, scores=True, values=True),
    Case("shaw-keys", {"type": "shaw", "max_distance": 4, "values": False, "query_term": True}, scores=True),
    Case("transformer_xl", "transformer_xl", scores=True),
    Case("transformer_xl-shared", {"type": "transformer_xl", "shared_bias": True}, scores=True),
    Case("tupe", {"type": "tupe", "num_buckets": 8, "max_distance": 20}, extends=False, scores=True),
    Case("tupe-untied", {"type": "tupe", "relative": False, "untie_cls": True}, extends=False, scores=True),
    Case("deberta", {"type": "deberta", "max_distance": 24, "buckets": 6}, scores=True),
    Case("deberta-v1", DEBERTA_V1, scores=True),
    Case("cope", {"type": "cope", "max_positions": 6}, scores=True, causal=True, contextual=True),
    Case("none", "none"),
    Case("learned+t5", ["learned", T5], extends=False, scores=True),
    Case("sinusoidal+rope+alibi", ["sinusoidal", "rope", "alibi"], scores=True),
    Case("learned+sinusoidal-concat", ["learned", {"type": "sinusoidal", "mix": "concat"}], extends=False),
    Case("rope+shaw", ["rope", {"type": "shaw", "max_distance": 4}], scores=True, values=True),
    Case(
        "tupe+deberta",
        ["tupe", {"type": "deberta", "max_distance": 5, "terms": ["p2c"]}],
        extends=False,
        scores=True,
    ),
    Case("rope-but-every-third", {"type": "rope", "layers": "0:2"}),
    Case("xl-and-t5", [{"type": "transformer_xl", "layers": [0, 2]}, {**T5, "layers": [1]}], scores=True),
    Case("alternating", [{"type": "rope", "layers": "0::2"}, {"type": "alibi", "layers": [1]}], scores=True),
    Case("rope+llama4", ["rope", LLAMA4]),
    Case("learned+ssmax", ["learned", SSMAX], extends=False),
    Case("alibi+ssmax", ["alibi", {**SSMAX, "bias": False}], scores=True),
    Case("shaw+llama4", [{"type": "shaw", "max_distance": 4}, LLAMA4], scores=True, values=True),
    Case("rope-p", {"type": "rope", "frequency_fraction": 0.5}),
    Case("rope-resonance", {"type": "rope", "resonance": True}),
    Case("rope-fourier", {"type": "rope", "theta": 20.0, "fourier": 0.5}),
    Case("rope-and-ssmax", [{"type": "rope", "layers": "0:2"}, {**SSMAX, "layers": [2]}]),
    Case("forget", "forget", scores=True, causal=True, contextual=True),
    Case("rope+cable", ["rope", CABLE], scores=True, causal=True),
]
ARCHITECTURES = ["bert", "bert-decoder", "gpt2", "llama"]
DECODERS = ["bert-decoder", "gpt2", "llama"]


def pairs(
    architectures: list[str], cases: list[Case] | None = None, fast_cases: list[str] | None = None, **axes: list[Any]
) -> Callable[[Any], Any]:
    """Parametrize a test with `case`, `architecture` and any further axes, for every case defined on the architecture.

    `make test` runs a third of the cases, one combination each. Which ones depends on the name of the test, so every
    value of an axis runs for some cases, and every case in some tests. `fast_cases`, a list of ids, replaces that
    choice. `make test-all` runs all combinations.

    Example:
        >>> @pairs(DECODERS, backend=["sdpa", "eager"])
        ... def test_something(case: Case, architecture: str, backend: str) -> None: ...
    """

    def decorate(test: Any) -> Any:
        offset = zlib.crc32(test.__name__.encode())
        rows = []
        for index, case in enumerate(CASES):
            if cases is not None and case not in cases:
                continue
            defined = [name for name in architectures if not (case.causal and name == "bert")]
            combinations = list(itertools.product(defined, *axes.values()))
            # 7 is coprime to the number of combinations, so neighboring cases differ in all axes.
            left_out = (index + offset) % 3 if fast_cases is None else case.id not in fast_cases
            fast = None if left_out else (7 * index + offset) % len(combinations)
            for number, (architecture, *values) in enumerate(combinations):
                labels = [_label(name, value) for name, value in zip(axes, values, strict=True)]
                marks = [] if number == fast else [pytest.mark.slow]
                rows.append(
                    pytest.param(
                        case, architecture, *values, id="-".join([architecture, case.id, *labels]), marks=marks
                    )
                )
        return pytest.mark.parametrize(("case", "architecture", *axes), rows)(test)

    return decorate


def _label(name: str, value: Any) -> str:
    return value if isinstance(value, str) else f"{name}={str(value).removeprefix('torch.')}"
