"""Sliding windows: every combination with padding, packing, caches and score terms equals a slow reference."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from transformers import DynamicCache, StaticCache

from hf_posenc.errors import PosEncError
from tests.support import families, windows
from tests.support import tiny_models as tiny
from tests.support.families import assert_close, differ, output

CHUNKS = [(0, 3), (3, 9), (9, 10), (10, 11), (11, 12), (12, 14)]
"""A prefill shorter than the window, a chunk that is longer, single tokens, and a last pair."""
IDS = tiny.tokens(2, windows.LENGTH)


def build(model_type: str, name: str, in_window: bool, backend: str = "sdpa") -> Any:
    changes = windows.SETTINGS[model_type][0 if in_window else 1]
    return families.model(model_type, windows.SCHEMES.get(name, name), backend=backend, **changes)


def cached_output(model: Any, inputs: dict[str, torch.Tensor], kind: str = "dynamic") -> torch.Tensor:
    cache, steps = DynamicCache(config=model.config), []
    if kind == "static":
        cache = StaticCache(model.config, max_cache_len=windows.LENGTH + 2)
    for start, stop in CHUNKS:
        step = {"attention_mask": inputs["attention_mask"][:, :stop]} if "attention_mask" in inputs else {}
        if "position_ids" in inputs:
            step["position_ids"] = inputs["position_ids"][:, start:stop]
        steps.append(output(model, IDS[:, start:stop], past_key_values=cache, use_cache=True, **step))
    return torch.cat(steps, dim=1)


def combinations() -> list[Any]:
    """All combinations; the fast tests run every 37th, which differ in all axes."""
    caches = ["uncached", "dynamic", "static"]
    axes = (windows.SETTINGS, windows.SCHEMES, ["none", "left", "right"], [False, True], caches, [True, False])
    rows = []
    for number, (model_type, name, padding, packed, cache, in_window) in enumerate(itertools.product(*axes)):
        if cache != "uncached" and (packed or model_type == "modernbert"):
            continue  # packed rows cannot be continued, and encoders have no cache
        flags = {"packed": packed, "window": in_window}
        label = "-".join([model_type, name, padding, cache, *(flag for flag, is_set in flags.items() if is_set)])
        marks = [] if number % 37 == 0 else [pytest.mark.slow]
        rows.append(pytest.param(model_type, name, padding, packed, cache, in_window, id=label, marks=marks))
    return rows


@pytest.mark.parametrize(("model_type", "name", "padding", "packed", "cache", "in_window"), combinations())
def test_equals_reference(model_type: str, name: str, padding: str, packed: bool, cache: str, in_window: bool) -> None:
    batch, model = windows.layout(padding, packed), build(model_type, name, in_window)
    expected = windows.reference_output(model_type, name, model, batch, IDS, in_window)
    options = {} if model_type == "modernbert" else {"use_cache": False}
    if cache == "uncached":
        actual = output(model, IDS, **batch.inputs, **options)
    else:
        actual = cached_output(model, batch.inputs, cache)
    assert_close(actual[batch.real_BN], expected[batch.real_BN])
    if cache == "uncached":
        model.set_attn_implementation("eager")
        assert_close(output(model, IDS, **batch.inputs, **options)[batch.real_BN], expected[batch.real_BN])
    if in_window:  # the control: the window matters
        unlimited = windows.reference_output(model_type, name, model, batch, IDS, in_window=False)
        assert differ(actual[batch.real_BN], unlimited[batch.real_BN])


@pytest.mark.parametrize(
    ("model_type", "name"),
    [
        pytest.param(model_type, name, marks=[] if row == column else [pytest.mark.slow])
        for row, model_type in enumerate(windows.SETTINGS)
        for column, name in enumerate(windows.SCHEMES)
    ],
)
def test_windows_count_slots_and_terms_count_positions(model_type: str, name: str) -> None:
    """Positions that jump by 7 in the middle: the keys before the jump stay in the window, at larger distances."""
    batch, model = windows.layout("none", packed=False, gap=7), build(model_type, name, in_window=True)
    options = {} if model_type == "modernbert" else {"use_cache": False}
    actual = output(model, IDS, **batch.inputs, **options)
    assert_close(actual, windows.reference_output(model_type, name, model, batch, IDS, in_window=True))
    without_gap = windows.layout("none", packed=False)
    assert differ(actual, windows.reference_output(model_type, name, model, without_gap, IDS, in_window=True))


@pytest.mark.parametrize("padding", ["none", "left"])
@pytest.mark.parametrize("model_type", windows.SETTINGS)
def test_reference_computes_what_stock_does(model_type: str, padding: str) -> None:
    batch = windows.layout(padding, packed=False)
    stock = families.model(model_type, **windows.SETTINGS[model_type][0])
    expected = windows.reference_output(model_type, "none", stock, batch, IDS, in_window=True)
    with windows.without_rotation(stock):
        assert_close(output(stock, IDS, **batch.inputs)[batch.real_BN], expected[batch.real_BN])


@pytest.mark.parametrize("model_type", ["mistral", "gemma3_text", "qwen2"])
def test_own_rotation_in_windows_equals_stock(model_type: str) -> None:
    """Whole, packed and in chunks. The stock models take position_ids that restart for packed rows, too."""
    stock, model = (families.model(model_type, scheme, **windows.SETTINGS[model_type][0]) for scheme in (None, "rope"))
    packed = windows.layout("none", packed=True).inputs
    for inputs in ({}, packed):
        assert torch.equal(output(model, IDS, use_cache=False, **inputs), output(stock, IDS, use_cache=False, **inputs))
    assert torch.equal(cached_output(model, {}), cached_output(stock, {}))
    assert differ(output(model, IDS, use_cache=False), output(model, IDS, use_cache=False, **packed))


def test_packed_rows_cannot_be_continued_from_a_cache() -> None:
    model = build("mistral", "alibi", in_window=True)
    with pytest.raises(PosEncError, match="cannot be continued"):
        cached_output(model, windows.layout("none", packed=True).inputs)


def test_static_windows_refuse_schemes_that_need_the_position_of_each_key() -> None:
    """Keys move between the slots of a static window."""
    model = build("mistral", "tupe", in_window=True)
    with pytest.raises(PosEncError, match="DynamicCache"):
        cached_output(model, {}, "static")
