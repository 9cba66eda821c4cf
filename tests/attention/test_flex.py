"""flex_attention looks terms up: what score_mod captures is vectors and tables, nothing of queries x keys."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hf_posenc.attention import flex
from tests.support import tiny_models as tiny

LENGTH = 512
LOOKED_UP = [
    ("alibi", False),
    ("t5", False),
    ({"type": "shaw", "max_distance": 8, "values": False, "query_term": True}, False),
    ({"type": "deberta", "max_distance": 16}, False),
    ({"type": "tupe", "relative": True}, True),
]


def captured(lookup: Any) -> list[torch.Tensor]:
    return [cell.cell_contents for cell in lookup.__closure__ if isinstance(cell.cell_contents, torch.Tensor)]


@pytest.mark.parametrize(("scheme", "folds"), LOOKED_UP, ids=str)
@pytest.mark.parametrize("architecture", ["bert", "gpt2", "llama"])
def test_nothing_square_is_captured(
    scheme: Any, folds: bool, architecture: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "n_positions" if architecture == "gpt2" else "max_position_embeddings"
    model, found, folded = tiny.model(architecture, scheme, torch.float32, **{name: LENGTH}), [], []
    ids = tiny.tokens(1, LENGTH)
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits
    real = flex.flex

    def watched(
        module: Any, query: Any, key: Any, value: Any, mask: Any, lookups: Any, separable: Any, **kwargs: Any
    ) -> Any:
        found.extend(tensor for lookup in lookups for tensor in captured(lookup))
        folded.extend(separable)
        return real(module, query, key, value, mask, lookups, separable, **kwargs)

    monkeypatch.setattr(flex, "flex", watched)
    model.set_attn_implementation("flex_attention")
    with torch.no_grad():
        output = model(ids, use_cache=False).logits
    torch.testing.assert_close(output, expected, rtol=0, atol=2e-5)
    assert found or folded
    assert all(tensor.numel() < LENGTH * LENGTH for tensor in found)
    assert bool(folded) == folds
