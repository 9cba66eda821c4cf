"""flex_attention reads terms through score_mod: it captures vectors and tables, never a Q x K tensor."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import StaticCache

from hf_posenc.attention import flex
from hf_posenc.patches import attention_modules
from tests.support import tiny_models as tiny

LENGTH = 256
ARCHITECTURES = ["bert", "gpt2", "llama"]
SCHEMES = [
    ("alibi", None, False),
    ("t5", None, False),
    ({"type": "shaw", "max_distance": 8, "values": False, "query_term": True}, None, False),
    ({"type": "deberta", "max_distance": 16}, None, False),
    ({"type": "tupe", "relative": True}, None, True),
    ("forget", None, False),
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
        if (scheme, architecture) != ("forget", "bert")
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


@pytest.fixture
def uncompiled_masks() -> Iterator[None]:
    """transformers compiles the creation of block masks, which takes seconds for every shape."""
    with torch.compiler.set_stance("force_eager"):
        yield


@pytest.fixture
def stock_continues_static_caches(uncompiled_masks: None) -> None:
    """Skip the test where stock models raise for a static cache that is continued, as in transformers 5.4."""
    model = tiny.model("llama", dtype=torch.float32)
    model.set_attn_implementation("flex_attention")
    try:
        decode(model, tiny.tokens(2, 9), StaticCache(config=model.config, max_cache_len=12), 0, 6, 7)
    except ValueError as error:
        pytest.skip(f"stock models cannot continue static caches on flex_attention in this release: {error}")


@torch.no_grad()
def decode(model: Any, ids: torch.Tensor, cache: Any, *stops: int) -> torch.Tensor:
    """The logits of rows that are passed in pieces."""
    pieces = [model(ids[:, start:stop], past_key_values=cache).logits for start, stop in itertools.pairwise(stops)]
    return torch.cat(pieces, dim=1)


@pytest.mark.usefixtures("uncompiled_masks", "stock_continues_static_caches")
@pytest.mark.parametrize(
    ("architecture", "scheme"),
    [
        pytest.param("gpt2", "alibi"),
        *(
            pytest.param(architecture, scheme, marks=pytest.mark.slow)
            for architecture in ("gpt2", "llama", "bert-decoder")
            for scheme in ("rope", "t5", "tupe", "deberta")
        ),
    ],
)
def test_static_cache_is_continued(architecture: str, scheme: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = tiny.model(architecture, scheme, torch.float32), tiny.tokens(2, 9)
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits
    model.set_attn_implementation("flex_attention")
    cache = StaticCache(config=model.config, max_cache_len=12)
    torch.testing.assert_close(decode(model, ids, cache, 0, 6, 7, 9), expected, rtol=0, atol=2e-5)
    cache.reset()  # its length is a tensor from the first call on now
    torch.testing.assert_close(decode(model, ids, cache, 0, 8, 9), expected, rtol=0, atol=2e-5)
    monkeypatch.setattr(attention_modules, "keep_length_for_masks", lambda *args: None)  # control
    cache.reset()
    assert not torch.allclose(decode(model, ids, cache, 0, 8, 9), expected, rtol=0, atol=1e-3)


@pytest.mark.slow
@pytest.mark.usefixtures("uncompiled_masks", "stock_continues_static_caches")
@pytest.mark.parametrize("scheme", ["alibi", "rope", "tupe"])
@pytest.mark.parametrize("side", ["none", "left", "right"])
def test_generate_with_a_static_cache(scheme: Any, side: str) -> None:
    model, ids = tiny.model("llama", scheme, torch.float32), tiny.tokens(2, 7)
    mask = tiny.padding_mask(ids, {"none": [0, 0], "left": [0, 3], "right": [0, -3]}[side])
    expected = tiny.generate_logits(model, ids, mask, use_cache=False)
    model.set_attn_implementation("flex_attention")
    logits = tiny.generate_logits(model, ids, mask, cache_implementation="static")
    torch.testing.assert_close(logits, expected, rtol=0, atol=2e-5)
