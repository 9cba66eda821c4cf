"""When the Triton kernels are taken. `tests/gpu_harness` runs them; here, flex_attention stands in for them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import hf_posenc
from hf_posenc.attention import dispatch, flex, function, triton_support
from hf_posenc.attention.dispatch import FLEX_SETTING, AttentionPath, DispatchKey, select_path
from hf_posenc.attention.triton_support import TRITON_SETTING
from hf_posenc.errors import PosEncError
from hf_posenc.schemes.terms import DistanceBias
from tests.support import tiny_models as tiny
from tests.support.pretended_gpu import pretend_gpu

SCHEME = {"type": "t5", "num_buckets": 8}
PADDING = torch.tensor([[0, 0, 0, *[1] * 9], [1] * 12])
HOLE = torch.tensor([[1, 0, *[1] * 10], [1] * 12])
PACKED = torch.cat([torch.arange(5), torch.arange(7)])[None].expand(2, -1)


@pytest.fixture
def paths(monkeypatch: pytest.MonkeyPatch) -> list[AttentionPath]:
    """Switch the kernels on, for inputs of any size, as if there were a GPU. The paths that layers take."""
    monkeypatch.setattr(triton_support, "has_triton", lambda: True)
    monkeypatch.setitem(function.PATHS, AttentionPath.TRITON, flex.flex_attention_with_terms)
    monkeypatch.setenv(TRITON_SETTING, "1")
    return pretend_gpu(monkeypatch)


def run(scheme: Any = SCHEME, dtype: torch.dtype = torch.float32, **inputs: Any) -> None:
    with torch.no_grad():
        tiny.model("gpt2", scheme, dtype, n_layer=1)(tiny.tokens(2, 12), use_cache=False, **inputs)


@pytest.mark.parametrize(
    ("inputs", "path"),
    [
        ({}, AttentionPath.TRITON),
        ({"attention_mask": PADDING}, AttentionPath.TRITON),
        ({"position_ids": PACKED}, AttentionPath.TRITON),
        ({"attention_mask": HOLE}, AttentionPath.FLEX),
        ({"attention_mask": tiny.additive_mask(torch.ones(2, 1, 12, 12).tril().bool())}, AttentionPath.FLEX),
        ({"dtype": torch.float64}, AttentionPath.FLEX),
        ({"scheme": "transformer_xl"}, AttentionPath.FLEX),
        ({"scheme": [SCHEME, "transformer_xl"]}, AttentionPath.FLEX),
        ({"scheme": [SCHEME, "kerple"]}, AttentionPath.TRITON),
    ],
    ids=["plain", "padded", "packed", "hole", "additive", "float64", "content", "bias and content", "two biases"],
)
def test_what_takes_the_kernels(inputs: dict[str, Any], path: AttentionPath, paths: list[AttentionPath]) -> None:
    run(**inputs)
    assert paths == [path]


def test_they_are_off_by_default(paths: list[AttentionPath], monkeypatch: pytest.MonkeyPatch) -> None:
    for value in (None, "0", ""):
        monkeypatch.delenv(TRITON_SETTING)
        if value is not None:
            monkeypatch.setenv(TRITON_SETTING, value)
        assert not triton_support.triton_enabled()
        monkeypatch.setenv(TRITON_SETTING, "1")
    assert triton_support.triton_enabled()
    monkeypatch.setattr(triton_support, "has_triton", lambda: False)
    run()
    assert paths == [AttentionPath.FLEX]


def test_another_setting_is_refused(paths: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TRITON_SETTING, "yes")
    with pytest.raises(PosEncError, match="must be 0 or 1, got 'yes'"):
        run()


def test_large_heads_are_left_to_flex_attention(paths: Any) -> None:
    terms = [DistanceBias(torch.zeros(1, 3))]
    assert triton_support.triton_supports(terms, torch.bfloat16, 128)
    assert not triton_support.triton_supports(terms, torch.bfloat16, 129)
    assert not triton_support.triton_supports([], torch.bfloat16, 64)


def test_dropout_and_gradients_do_not_change_the_path() -> None:
    key = DispatchKey("sdpa", frozenset({DistanceBias}), on_cpu=False, flex_pays=True, triton_computes=True)
    for changes in ({}, {"dropout": True}, {"requires_grad": True}, {"dropout": True, "requires_grad": True}):
        assert select_path(key._replace(**changes))[0] is AttentionPath.TRITON
    for changes in ({"single_query": True}, {"tracing": True}, {"mask_requires_grad": True}):
        assert select_path(key._replace(**changes))[0] is AttentionPath.DENSE_BIAS
    assert select_path(key._replace(backend="flex_attention"))[0] is AttentionPath.FLEX
    assert select_path(key._replace(backend="eager"))[0] is AttentionPath.DENSE_BIAS
    assert select_path(key._replace(caps_or_sinks=True))[0] is AttentionPath.DENSE_BIAS


def test_a_cpu_never_asks_for_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(call: Any) -> bool:
        raise AssertionError("asked on a CPU")

    monkeypatch.setattr(dispatch, "triton_computes", fail)
    monkeypatch.setenv(FLEX_SETTING, "0")
    monkeypatch.setenv(TRITON_SETTING, "1")
    run()


def test_explain_says_so(paths: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny.model("gpt2", SCHEME, torch.float32)
    lines = str(hf_posenc.explain(model)).splitlines()
    (taken,) = [line for line in lines if AttentionPath.TRITON.value in line]
    assert f"{TRITON_SETTING}=1" in taken
    for situation in ("no padding", "training", "training with dropout", "packed rows or a window"):
        assert f"from 0 scores per layer on, {situation}" in taken or f" {situation}" in taken
    (left,) = [line for line in lines if "sdpa" in line and AttentionPath.FLEX.value in line]
    assert "from 0 scores per layer on, any other mask" in left
    monkeypatch.setenv(TRITON_SETTING, "0")
    assert AttentionPath.TRITON.value not in str(hf_posenc.explain(model))
