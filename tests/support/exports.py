"""Variants that have a stock equal, on disk, and their exports."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import hf_posenc
from tests.support import families
from tests.support import tiny_models as tiny

EQUAL = {"rtol": 0, "atol": 2e-5}
"""Float32 sums in a different order, through three layers, for outputs of up to 4."""


@dataclasses.dataclass(frozen=True)
class ExportCase:
    """A variant, the model type it is exported as, and a scheme that is a little different."""

    architecture: str
    scheme: Any
    target: str
    other: Any
    slow: bool = True


def rope(**options: Any) -> dict[str, Any]:
    return {"type": "rope", **options}


def scaling(rope_type: str, **settings: Any) -> dict[str, Any]:
    return rope(scaling={"rope_type": rope_type, "factor": 4.0, **settings})


LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
LONGROPE = {"short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [1.5, 2.0, 2.5, 3.0]}
EXTENDED = {"type": "learned", "max_positions": 96, "extend": "interpolate"}
DEBERTA_V1 = {"type": "deberta", "max_distance": 6, "share_projections": False, "norm": None}
DEBERTA_V2 = {"type": "deberta", "max_distance": 20, "buckets": 8}
CASES = {
    "llama-theta": ExportCase("llama", rope(theta=500.0), "llama", rope(theta=450.0), slow=False),
    "llama-yarn": ExportCase("llama", scaling("yarn"), "llama", scaling("linear")),
    "llama-linear": ExportCase("llama", scaling("linear"), "llama", "rope"),
    "llama-llama3": ExportCase("llama", scaling("llama3", **LLAMA3), "llama", "rope"),
    "llama-dynamic": ExportCase("llama", scaling("dynamic"), "llama", rope(theta=9000.0)),
    "llama-longrope": ExportCase("llama", scaling("longrope", **LONGROPE), "llama", "rope"),
    "llama-interleaved": ExportCase("llama", rope(layout="interleaved"), "llama", "rope"),
    "llama-some-layers": ExportCase("llama", rope(layers=[0, 2]), "smollm3", rope(layers=[0, 1]), slow=False),
    "llama-none": ExportCase("llama", "none", "smollm3", rope(layers=[0])),
    "llama-some-interleaved": ExportCase(
        "llama", rope(layers=[1], layout="interleaved", theta=500.0), "smollm3", rope(layers=[1], theta=500.0)
    ),
    "llama-partial": ExportCase(
        "llama", rope(partial_rotary_factor=0.5, theta=500.0), "phi3", rope(partial_rotary_factor=0.25), slow=False
    ),
    "llama-partial-interleaved": ExportCase(
        "llama",
        rope(partial_rotary_factor=0.5, layout="interleaved", theta=500.0),
        "phi3",
        rope(partial_rotary_factor=0.5, theta=500.0),
    ),
    "gpt2-extended": ExportCase("gpt2", EXTENDED, "gpt2", {**EXTENDED, "extend": "tile"}),
    "gpt2-sum": ExportCase("gpt2", ["learned", {"type": "window", "window_size": 5}], "gpt2", "learned"),
    "gpt2-none": ExportCase("gpt2", "none", "gpt2", "sinusoidal"),
    "gpt2-rope": ExportCase("gpt2", "rope", "gpt_neox", rope(theta=9000.0)),
    "gpt2-partial": ExportCase(
        "gpt2",
        rope(theta=500.0, layout="interleaved", partial_rotary_factor=0.5),
        "gpt_neox",
        rope(theta=500.0, partial_rotary_factor=0.5),
        slow=False,
    ),
    "gpt2-yarn": ExportCase("gpt2", scaling("yarn"), "gpt_neox", "rope"),
    "bert-sinusoidal": ExportCase("bert", "sinusoidal", "bert", {"type": "sinusoidal", "base": 9000.0}),
    "bert-polynomial": ExportCase("bert", "polynomial", "bert", {"type": "polynomial", "degree": 2}),
    "bert-exponential": ExportCase("bert", "exponential", "bert", {"type": "exponential", "rates": 7}),
    "bert-interleaved": ExportCase("bert", rope(layout="interleaved"), "roformer", "rope", slow=False),
    "bert-partial": ExportCase(
        "bert", rope(partial_rotary_factor=0.5, theta=100.0), "roformer", rope(partial_rotary_factor=0.5)
    ),
    "bert-yarn": ExportCase("bert", scaling("yarn"), "roformer", "rope"),
    "bert-learned-t5": ExportCase("bert", ["learned", "t5"], "mpnet", "learned", slow=False),
    "bert-t5": ExportCase("bert", "t5", "mpnet", "none"),
    "bert-deberta-v1": ExportCase("bert", DEBERTA_V1, "deberta-v2", {**DEBERTA_V1, "max_distance": 5}),
    "bert-deberta-v2": ExportCase("bert", DEBERTA_V2, "deberta-v2", {**DEBERTA_V2, "max_distance": 24}, slow=False),
    "bert-deberta-c2p": ExportCase("bert", {**DEBERTA_V2, "terms": ["c2p"]}, "deberta-v2", "none"),
    "bert-deberta-p2c": ExportCase("bert", {**DEBERTA_V1, "terms": ["p2c"]}, "deberta-v2", "none"),
    "bert-deberta-learned": ExportCase("bert", ["learned", DEBERTA_V2], "deberta-v2", "learned"),
    "roberta-sinusoidal": ExportCase("roberta", "sinusoidal", "roberta", "none", slow=False),
    "opt-window": ExportCase("opt", {"type": "window", "window_size": 5}, "opt", "none"),
    "albert-sinusoidal": ExportCase("albert", "sinusoidal", "albert", "none"),
    "distilbert-none": ExportCase("distilbert", "none", "distilbert", "learned"),
    "qwen2-some-layers": ExportCase("qwen2", rope(layers=[0, 2]), "smollm3", "rope"),
    "mistral-none": ExportCase("mistral", "none", "smollm3", "rope"),
    "smollm3-other-layers": ExportCase(
        "smollm3", rope(theta=500.0, layers=[1, 2]), "smollm3", rope(theta=500.0, layers=[0, 2])
    ),
    # Angles of its own are left to the stock code, which does not rotate in layer 1.
    "smollm3-fewer-layers": ExportCase("smollm3", rope(layers=[0, 1]), "smollm3", "rope"),
    "qwen3-theta": ExportCase("qwen3", rope(theta=500.0), "qwen3", "rope"),
    "gemma3-theta": ExportCase("gemma3_text", rope(theta=500.0), "gemma3_text", "rope"),
    "gemma3-scaled": ExportCase("gemma3_text", scaling("linear"), "gemma3_text", "rope"),
    "gemma3-sliding": ExportCase(
        "gemma3_text",
        [rope(layers="full_attention"), rope(theta=500.0, layers="sliding_attention")],
        "gemma3_text",
        rope(theta=500.0),
    ),
    "phi-partial": ExportCase(
        "phi", rope(partial_rotary_factor=1.0), "phi", rope(partial_rotary_factor=0.5, theta=9000.0)
    ),
}
"""All exports, one per row. `slow` ones run in `make test-all` only."""


def build(architecture: str, scheme: Any, dtype: torch.dtype = torch.float32) -> Any:
    """A tiny variant with parameters far from their initial values."""
    if architecture in tiny.MODEL_CLASSES:
        return tiny.model(architecture, scheme, dtype)
    return families.model(architecture, scheme, dtype, auto=families.auto_class(architecture))


def save(directory: Path, architecture: str, scheme: Any, **options: Any) -> Any:
    """Save a tiny variant; returns it."""
    model = build(architecture, scheme)
    model.save_pretrained(directory, **options)
    return model


def export_of(case: ExportCase, directory: Path) -> tuple[Any, Any, hf_posenc.Export]:
    """A variant, the stock model that it is exported as, and the report."""
    variant = save(directory / "variant", case.architecture, case.scheme)
    export = hf_posenc.export_checkpoint(directory / "variant", directory / "stock")
    stock_class = getattr(transformers, export.architecture)
    stock, info = stock_class.from_pretrained(directory / "stock", output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    return variant, stock.eval(), export


by_case = pytest.mark.parametrize(
    "case", [pytest.param(case, id=name, marks=[pytest.mark.slow] * case.slow) for name, case in CASES.items()]
)
