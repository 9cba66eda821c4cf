"""flex_attention reads terms through score_mod: it captures vectors and tables, never a Q x K tensor."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hf_posenc.attention import flex
from tests.support import tiny_models as tiny

LENGTH = 256
ARCHITECTURES = ["bert", "gpt2", "llama"]
SCHEMES = [
    ("alibi", None, False),
    ("t5", None, False),
    ({"type": "shaw", "max_distance": 8, "values": False, "query_term": True}, "gpt2", False),
    ({"type": "deberta", "max_distance": 16}, None, False),
    ({"type": "tupe", "relative": True}, "bert", True),
]
"""Each with the architecture that it runs on in `make test`, if any, and whether its terms are separable."""


def captured_tensors(score_term: Any) -> list[torch.Tensor]:
    return [cell.cell_contents for cell in score_term.__closure__ if isinstance(cell.cell_contents, torch.Tensor)]


@pytest.mark.parametrize(
    ("scheme", "architecture", "is_separable"),
    [
        pytest.param(scheme, architecture, is_separable, marks=[] if architecture == fast else [pytest.mark.slow])
        for scheme, fast, is_separable in SCHEMES
        for architecture in ARCHITECTURES
    ],
)
def test_score_mod_captures_no_quadratic_tensor(
    scheme: Any, architecture: str, is_separable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    option = "n_positions" if architecture == "gpt2" else "max_position_embeddings"
    model, ids = tiny.model(architecture, scheme, torch.float32, **{option: LENGTH}), tiny.tokens(1, LENGTH)
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits
    captured: list[torch.Tensor] = []
    concatenated: list[Any] = []
    run_flex_attention = flex.run_flex_attention

    def recording(*args: Any, **kwargs: Any) -> Any:
        score_terms, separable = args[5:7]
        captured.extend(tensor for score_term in score_terms for tensor in captured_tensors(score_term))
        concatenated.extend(separable)
        return run_flex_attention(*args, **kwargs)

    monkeypatch.setattr(flex, "run_flex_attention", recording)
    model.set_attn_implementation("flex_attention")
    with torch.no_grad():
        logits = model(ids, use_cache=False).logits
    torch.testing.assert_close(logits, expected, rtol=0, atol=2e-5)
    assert captured or concatenated
    assert all(tensor.numel() < LENGTH * LENGTH for tensor in captured)
    assert bool(concatenated) == is_separable
