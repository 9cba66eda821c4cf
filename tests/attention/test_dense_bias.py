"""The bias that is written out for SDPA: its memory, its gradient, and which inputs require gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hf_posenc.attention import distance_mask as module
from hf_posenc.attention import function
from hf_posenc.attention.dense import expand_distances
from hf_posenc.attention.dispatch import AttentionPath, DispatchKey, select_path
from hf_posenc.attention.distance_mask import distance_mask
from hf_posenc.attention.masks import apply_mask
from tests.support import tiny_models as tiny
from tests.support.tensor_sizes import PeakBytes

HEADS = 4


def visible(rows: int, num_queries: int, num_keys: int, heads: int = 1) -> torch.Tensor:
    mask = torch.rand(rows, heads, num_queries, num_keys, generator=torch.Generator().manual_seed(1)) < 0.6
    mask[:, :, 1] = False  # a query that sees nothing
    return mask


def expected_mask(values: torch.Tensor, mask: Any, causal: bool, num_keys: int, dtype: torch.dtype) -> torch.Tensor:
    num_queries = values.shape[1] - num_keys + 1
    return apply_mask(expand_distances(values, num_queries, num_keys).to(dtype), mask, causal)


MASKS = {
    "causal": (None, True, 7),
    "none": (None, False, 9),
    "rows": (visible(2, 7, 9), False, 9),
    "heads": (visible(2, 7, 9, HEADS), False, 9),
    "longer": (visible(1, 7, 12), False, 9),
}


@pytest.mark.parametrize("heads", [HEADS, 1])
@pytest.mark.parametrize("name", MASKS)
def test_equals_the_mask_that_is_expanded_first(name: str, heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BACKWARD_CHUNK", 2 * HEADS * 9 * 3)  # three queries at a time, the last chunk one
    mask, causal, num_keys = MASKS[name]
    values = torch.randn(heads, 6 + num_keys, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    masks, gradients = [], []
    for make in (distance_mask, expected_mask):
        leaf = values.clone().requires_grad_()
        masks.append(make(leaf, mask, causal, num_keys, torch.float64))
        weights = torch.linspace(-1, 1, masks[-1].numel(), dtype=torch.float64).view_as(masks[-1])
        (masks[-1] * weights).sum().backward()
        gradients.append(leaf.grad)
    assert torch.equal(*masks)
    torch.testing.assert_close(*gradients, rtol=1e-12, atol=1e-12)
    wrong = distance_mask(values.flip(1), mask, causal, num_keys, torch.float64)  # control
    assert not torch.equal(wrong, masks[1])


@pytest.mark.parametrize("masked", [False, True])
def test_two_bytes_per_score(masked: bool) -> None:
    length = 256
    values, mask = torch.randn(HEADS, 2 * length - 1), visible(1, length, length) if masked else None
    peaks = []
    for make in (distance_mask, expected_mask):
        with PeakBytes(*([] if mask is None else [mask])) as memory:
            make(values, mask, mask is None, length, torch.bfloat16)
        peaks.append(memory.peak / (HEADS * length * length))
    one_head = 2 / HEADS if masked else 0
    assert peaks[0] <= 2.05 + one_head
    assert peaks[1] >= 6  # control: expanded first


def test_gradient_of_a_narrow_mask_is_summed_in_float32() -> None:
    length = 512
    values = torch.zeros(1, 2 * length - 1, requires_grad=True)
    distance_mask(values, None, False, length, torch.bfloat16).sum().backward()
    assert values.grad is not None
    assert values.grad[0, length - 1] == length  # in bfloat16, a sum of ones stops at 256


@pytest.fixture
def on_other_device(monkeypatch: pytest.MonkeyPatch) -> list[AttentionPath]:
    """Take the paths of a device that is not the CPU."""
    paths: list[AttentionPath] = []

    def forced(key: DispatchKey) -> tuple[AttentionPath, str]:
        path, reason = select_path(key._replace(on_cpu=False))
        paths.append(path)
        return path, reason

    monkeypatch.setattr(function, "select_path", forced)
    return paths


PACKED = torch.cat([torch.arange(5), torch.arange(7)])[None].expand(2, -1)


@pytest.mark.parametrize("scheme", ["t5", "transformer_xl"])
def test_no_sdpa_call_in_which_only_the_mask_requires_a_gradient(
    scheme: str, on_other_device: list[AttentionPath], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, sdpa = [], torch.nn.functional.scaled_dot_product_attention

    def recording(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        others = any(states.requires_grad for states in (query, key, value))
        calls.append((kwargs["attn_mask"].requires_grad, others))
        return sdpa(query, key, value, **kwargs)

    model, ids = tiny.model("gpt2", scheme), tiny.tokens(2, 12)
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", recording)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("position_scheme" in name)

    def gradients(position_ids: Any) -> list[torch.Tensor]:
        model.zero_grad()
        model(ids, position_ids=position_ids, use_cache=False).logits.square().mean().backward()
        return [parameter.grad for parameter in model.parameters() if parameter.requires_grad]

    for position_ids in (None, PACKED):
        model.set_attn_implementation("eager")
        expected = gradients(position_ids)
        model.set_attn_implementation("sdpa")
        on_other_device.clear()
        torch.testing.assert_close(gradients(position_ids), expected, rtol=0, atol=1e-9)
        assert on_other_device == [AttentionPath.DENSE_BIAS] * tiny.LAYERS
        assert calls == [(True, True)] * tiny.LAYERS
        calls.clear()


def test_a_bias_beyond_float16_does_not_outweigh_the_mask() -> None:
    """Clamped, it stays finite and above the value of hidden keys. The control: a plain cast overflows."""
    values_HL = torch.linspace(-1e6, 0, 7)[None]
    tril = torch.ones(4, 4).tril().bool()[None, None]
    mask = distance_mask(values_HL, tril, causal=False, num_keys=4, dtype=torch.float16)
    assert mask.isfinite().all()
    assert mask[tril].min() > mask[~tril].max()
    assert values_HL.to(torch.float16).isinf().any()
