"""The choice of an attention path: the pure function, and the path that models take."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hf_posenc.attention import function
from hf_posenc.attention.dispatch import AttentionPath, DispatchKey, MaskKind, select_path
from hf_posenc.schemes.terms import DistanceBias, QueryTerm, Separable
from tests.support import tiny_models as tiny

HOLE_IN_ROW = torch.tensor([[1, 0, *[1] * 10], [1] * 12])
LEFT_PADDING = torch.tensor([[0, 0, *[1] * 10], [1] * 12])
GAPS = torch.tensor([[*range(6), *range(9, 15)], [*range(12)]])
BIAS, QUERY = frozenset({DistanceBias}), frozenset({QueryTerm})
BIAS_AND_SEPARABLE = frozenset({DistanceBias, Separable})


@pytest.mark.parametrize(
    ("key", "path"),
    [
        (DispatchKey("sdpa", frozenset()), AttentionPath.STOCK),
        (DispatchKey("flash_attention_2", frozenset()), AttentionPath.STOCK),
        (DispatchKey("flash_attention_2", BIAS), AttentionPath.REFUSED),
        (DispatchKey("flex_attention", frozenset()), AttentionPath.FLEX),
        (DispatchKey("flex_attention", BIAS), AttentionPath.FLEX),
        (DispatchKey("flex_attention", BIAS, dropout=True), AttentionPath.REFUSED),
        (DispatchKey("flex_attention", QUERY, has_value_terms=True), AttentionPath.REFUSED),
        (DispatchKey("eager", BIAS), AttentionPath.DENSE_BIAS),
        (DispatchKey("eager", QUERY, has_value_terms=True), AttentionPath.DENSE_WEIGHTS),
        (DispatchKey("sdpa", BIAS), AttentionPath.STRIDED_BIAS),
        (DispatchKey("sdpa", BIAS, requires_grad=True), AttentionPath.STRIDED_BIAS),
        (DispatchKey("sdpa", BIAS, mask=MaskKind.PADDING), AttentionPath.STRIDED_BIAS_UNPADDED),
        (DispatchKey("sdpa", BIAS, mask=MaskKind.OTHER), AttentionPath.CHUNKED),
        (DispatchKey("sdpa", BIAS, dropout=True), AttentionPath.CHUNKED),
        (DispatchKey("sdpa", BIAS, single_query=True), AttentionPath.DENSE_BIAS),
        (DispatchKey("sdpa", BIAS, tracing=True), AttentionPath.DENSE_BIAS),
        (DispatchKey("sdpa", BIAS, on_cpu=False), AttentionPath.DENSE_BIAS),
        (DispatchKey("sdpa", BIAS, mask=MaskKind.OTHER, mask_requires_grad=True), AttentionPath.DENSE_BIAS),
        (DispatchKey("sdpa", BIAS, uniform=False), AttentionPath.DENSE_BIAS_BY_HEADS),
        (DispatchKey("sdpa", BIAS, uniform=False, requires_grad=True), AttentionPath.DENSE_BIAS),
        (DispatchKey("sdpa", BIAS_AND_SEPARABLE), AttentionPath.CHUNKED),
        (DispatchKey("sdpa", frozenset(), has_value_terms=True), AttentionPath.CHUNKED),
        (DispatchKey("sdpa", QUERY, has_value_terms=True, uniform=False), AttentionPath.DENSE_WEIGHTS),
    ],
)
def test_select_path(key: DispatchKey, path: AttentionPath) -> None:
    assert select_path(key)[0] is path


@pytest.mark.parametrize("uniform", [True, False])
@pytest.mark.parametrize("mask", MaskKind)
@pytest.mark.parametrize("term_types", [BIAS, QUERY, BIAS_AND_SEPARABLE])
def test_with_dropout_the_path_does_not_depend_on_gradients(
    term_types: frozenset[type], mask: MaskKind, uniform: bool
) -> None:
    key = DispatchKey("sdpa", term_types, mask=mask, uniform=uniform, dropout=True)
    assert select_path(key) == select_path(key._replace(requires_grad=True))


@pytest.mark.parametrize(
    ("scheme", "inputs", "path"),
    [
        ("alibi", {}, AttentionPath.STRIDED_BIAS),
        ("t5", {"attention_mask": LEFT_PADDING}, AttentionPath.STRIDED_BIAS_UNPADDED),
        ("t5", {"attention_mask": HOLE_IN_ROW}, AttentionPath.CHUNKED),
        ("t5", {"position_ids": GAPS}, AttentionPath.DENSE_BIAS_BY_HEADS),
        ({"type": "shaw", "values": False}, {}, AttentionPath.CHUNKED),
        ("deberta", {"attention_mask": LEFT_PADDING}, AttentionPath.CHUNKED),
        ("shaw", {}, AttentionPath.CHUNKED),
        ("shaw", {"position_ids": GAPS}, AttentionPath.DENSE_WEIGHTS),
        ("fire", {}, AttentionPath.CHUNKED),
    ],
    ids=["alibi", "t5-padding", "t5-hole", "t5-gaps", "shaw-keys", "deberta-padding", "shaw", "shaw-gaps", "fire"],
)
@pytest.mark.parametrize("architecture", ["bert", "gpt2", "llama"])
def test_path_of_a_model(
    architecture: str, scheme: Any, inputs: Any, path: AttentionPath, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, paths = tiny.model(architecture, scheme), []

    def recording(key: DispatchKey) -> tuple[AttentionPath, str]:
        paths.append(select_path(key)[0])
        return select_path(key)

    monkeypatch.setattr(function, "select_path", recording)
    with torch.no_grad():
        model(tiny.tokens(2, 12), use_cache=False, **inputs)
    assert paths == [path] * tiny.LAYERS
