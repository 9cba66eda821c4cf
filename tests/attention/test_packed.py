"""Packed rows: the distance inside a document is the distance of its slots, so that no path needs one per pair."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch.nn.attention.flex_attention import BlockMask

from hf_posenc.attention import chunked, flex, function
from hf_posenc.attention.dispatch import AttentionPath, DispatchKey, select_path
from tests.support import tiny_models as tiny
from tests.support.tensor_sizes import PeakBytes

DOCUMENTS = [(0, 4), (4, 5), (5, 12)]
PACKED = torch.cat([torch.arange(stop - start) for start, stop in DOCUMENTS])[None].expand(2, -1)
SCHEMES: dict[str, Any] = {
    "t5": "t5",
    "fire": {"type": "fire", "init": "paper"},
    "shaw": {"type": "shaw", "max_distance": 4, "query_term": True},
    "transformer_xl": "transformer_xl",
    "deberta": {"type": "deberta", "max_distance": 6},
    "tupe": {"type": "tupe", "relative": True},
    "alibi+llama4": ["alibi", {"type": "temperature", "attn_scale": 2.0, "floor_scale": 2}],
}
"""Biases by distance, terms of queries and keys, and what depends on the position itself: fire, tupe, temperature."""


def weighted_sum(logits: torch.Tensor) -> torch.Tensor:
    return (logits * torch.linspace(-1, 1, logits.shape[-1], dtype=logits.dtype)).sum()


@pytest.mark.parametrize("architecture", ["gpt2", pytest.param("bert", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", SCHEMES)
def test_gradients_equal_those_of_each_document_alone(
    name: str, architecture: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, ids, keys = tiny.model(architecture, SCHEMES[name]), tiny.tokens(2, 12), []

    def recording(key: DispatchKey) -> tuple[AttentionPath, str]:
        keys.append(key)
        return select_path(key)

    def gradients(runs: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        model.zero_grad()
        for inputs in runs:
            weighted_sum(model(**inputs, use_cache=False).logits).backward()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    expected = gradients([{"input_ids": ids[:, start:stop]} for start, stop in DOCUMENTS])
    monkeypatch.setattr(function, "select_path", recording)
    packed = gradients([{"input_ids": ids, "position_ids": PACKED}])
    assert keys
    assert all(key.uniform for key in keys)
    one_document = gradients([{"input_ids": ids}])  # control: without positions, documents see each other
    for name, gradient in expected.items():
        torch.testing.assert_close(packed[name], gradient, rtol=1e-8, atol=1e-10)
    assert any(not torch.allclose(one_document[name], expected[name], rtol=1e-3) for name in expected)


@pytest.mark.parametrize("backend", ["sdpa", "eager"])
def test_a_mask_of_the_caller_may_show_other_documents(backend: str) -> None:
    """Then every pair has its own distance. The reference adds the bias to the mask of a model without positions."""
    ids, causal = tiny.tokens(2, 12), torch.ones(12, 12, dtype=torch.bool).tril()
    mask = tiny.additive_mask(causal)[None, None].expand(2, 1, -1, -1)
    slopes = torch.tensor([2.0 ** (-2 * (head + 1)) for head in range(tiny.HEADS)], dtype=torch.float64)

    def expected_logits(positions: torch.Tensor) -> torch.Tensor:
        distances = (positions[:, None, :] - positions[:, :, None]).abs().double()
        bias = -slopes[:, None, None] * distances[:, None]
        return tiny.model("gpt2", "none")(ids, attention_mask=(mask + bias).clamp(min=mask.min())).logits

    model = tiny.model("gpt2", "alibi")
    model.set_attn_implementation(backend)
    with torch.no_grad():
        logits = model(ids, position_ids=PACKED, attention_mask=mask, use_cache=False).logits
        torch.testing.assert_close(logits, expected_logits(PACKED), rtol=0, atol=1e-9)
        by_slot = expected_logits(torch.arange(12).expand(2, -1))  # control
    assert (logits - by_slot).abs().max() > 1e-3


@pytest.mark.parametrize(
    "scheme", ["t5", pytest.param({"type": "deberta", "max_distance": 16}, id="deberta", marks=pytest.mark.slow)]
)
def test_memory_of_packed_rows(scheme: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """With small chunks, training stays below half a float32 tensor of batch x heads x queries x keys."""
    for name in ("KERNEL_CHUNK", "WEIGHTS_CHUNK", "KEY_TERM_CHUNK"):
        monkeypatch.setattr(chunked, name, 32)
    rows, length = 4, 384
    model = tiny.model("gpt2", scheme, torch.float32, n_positions=length, n_layer=1, n_head=8).base_model
    bias = rows * 8 * length * length * 4
    documents = [torch.arange(size) for size in (150, 100, 134)]

    def peak() -> int:
        inputs = {"input_ids": tiny.tokens(rows, length), "position_ids": torch.cat(documents).expand(rows, -1)}
        with PeakBytes(*model.parameters()) as memory:
            model(**inputs, use_cache=False)[0].sum().backward()
        model.zero_grad()
        return memory.peak

    packed = peak()
    documents[1] = documents[1] + (documents[1] > 50)  # control: a gap inside a document
    assert packed < bias / 2
    assert peak() > 2 * bias


@pytest.mark.parametrize("scheme", ["t5", {"type": "deberta", "max_distance": 8}], ids=["t5", "deberta"])
def test_flex_attention_reads_vectors_and_block_masks(scheme: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing that it reads has a number for each pair of query and key."""
    length, captured = 256, []

    def recording(*args: Any, **kwargs: Any) -> Any:
        _, query, _, _, mask, terms, _ = args
        functions = [*terms, mask.mask_mod] if isinstance(mask, BlockMask) else [*terms, lambda: mask]
        for read in functions:
            captured.extend(inspect.getclosurevars(read).nonlocals.values())
        return query.transpose(1, 2).contiguous(), None

    monkeypatch.setattr(flex, "run_flex_attention", recording)
    model = tiny.model("gpt2", scheme, torch.float32, n_positions=length)
    model.set_attn_implementation("flex_attention")

    def largest(position_ids: torch.Tensor) -> int:
        captured.clear()
        with torch.no_grad():
            model(tiny.tokens(1, length), position_ids=position_ids[None], use_cache=False)
        return max(tensor.numel() for tensor in captured if isinstance(tensor, torch.Tensor))

    documents = [torch.arange(100), torch.arange(length - 100)]
    assert largest(torch.cat(documents)) < length * length / 2
    documents[1] = documents[1] + (documents[1] > 50)  # control: a gap inside a document
    assert largest(torch.cat(documents)) >= length * length
