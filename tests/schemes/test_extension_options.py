"""Options of `extend`, what they reach, and what is refused."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from transformers import DynamicCache

import hf_posenc
from hf_posenc.errors import PosEncError
from hf_posenc.spec import parse_position_scheme
from tests.support import families
from tests.support import tiny_models as tiny
from tests.support.extension import DCA, LEAKY, REROPE, SELF_EXTEND, remapped_distance, rope


@pytest.mark.parametrize(
    ("extend", "message"),
    [
        ({}, "extend needs a method, one of"),
        ({"type": "dca"}, 'extend needs a method, one of .*, as in {"method"'),
        ({"method": "longrope"}, "unknown method 'longrope'"),
        ({"method": "SelfExtend"}, r"unknown method 'SelfExtend' \(did you mean 'self_extend'"),
        ({"method": "rerope", "group": 4}, r"rerope has no option 'group'; expected one of \['window'\]"),
        ({"method": "self_extend", "group_size": 4}, r"has no option 'group_size' \(did you mean 'group'"),
        ({"method": "self_extend", "window": 0}, "self_extend: window must be at least 1"),
        ({"method": "self_extend", "group": 2.5}, "group must be a whole number"),
        ({"method": "self_extend", "window": 10**30}, "window must be at most"),
        ({"method": "leaky_rerope", "k": 0.5}, "k must be at least 1"),
        ({"method": "leaky_rerope", "k": 1e308}, "k must be at most 1,000,000"),
        ({"method": "leaky_rerope", "k": math.nan}, "k must be a finite number"),
        ("self_extend", "extend must be a dict or None"),
    ],
)
def test_bad_options_are_refused(extend: Any, message: str) -> None:
    with pytest.raises(PosEncError, match=message):
        parse_position_scheme({"type": "rope", "extend": extend})


@pytest.mark.parametrize(
    ("architecture", "scheme", "message"),
    [
        ("bert", rope(REROPE), "extend is defined for causal models"),
        ("llama", rope(REROPE, scaling={"rope_type": "dynamic", "factor": 2.0}), "angles that do not change"),
        ("llama", [rope(REROPE), "alibi"], "'alibi' cannot act"),
        ("gpt2", [rope(REROPE), "xpos"], "'xpos' cannot act"),
        ("gpt2", [rope(REROPE), rope(DCA)], "'rope' cannot act"),
        ("llama", rope({"method": "dca", "chunk_size": 4, "local_window": 5}), "local_window must be at most"),
    ],
)
def test_what_does_not_fit_is_refused(architecture: str, scheme: Any, message: str) -> None:
    with pytest.raises(PosEncError, match=message):
        tiny.model(architecture, scheme)


@pytest.mark.parametrize("backend", ["flex_attention", "flash_attention_2"])
def test_backends_that_would_ignore_it_are_refused(backend: str) -> None:
    model = tiny.model("llama", rope(REROPE))
    with pytest.raises(PosEncError, match=r"cannot rotate far keys.*sdpa.*eager"):
        model.set_attn_implementation(backend)


def test_gaps_cannot_be_continued_from_a_cache() -> None:
    model, ids, cache = tiny.model("llama", rope(REROPE)), tiny.tokens(1, 12), DynamicCache()
    positions = torch.tensor([[0, 1, 2, 6, 7, 8, 9, 10, 11, 12, 13, 14]])
    model(ids[:, :11], position_ids=positions[:, :11], past_key_values=cache)
    with pytest.raises(PosEncError, match="gaps"):
        model(ids[:, 11:], position_ids=positions[:, 11:], past_key_values=cache)


def test_several_position_axes_are_refused() -> None:
    model = families.model("qwen3_vl_text", rope(REROPE))
    with pytest.raises(PosEncError, match="several axes"):
        families.output(model, tiny.tokens(1, 12), position_ids=torch.arange(12).expand(3, 1, -1))
    assert families.output(model, tiny.tokens(1, 12)).isfinite().all()


def test_explain_names_the_method_and_its_reach(capsys: pytest.CaptureFixture[str]) -> None:
    for extend, reach in ((SELF_EXTEND, "up to 129 tokens"), (REROPE, "at any length"), (LEAKY, "up to 111 tokens")):
        hf_posenc.explain(tiny.model("llama", rope(extend)))
        text = capsys.readouterr().out
        assert f"remap ({extend['method']}, window {extend['window']}" in text
        assert f"no effect up to {extend['window']} tokens" in text
        assert reach in text
        assert "merged by their log-sum-exp" in text


@pytest.mark.parametrize("extend", [SELF_EXTEND, LEAKY], ids=lambda extend: extend["method"])
def test_reach_is_the_last_length_within_the_trained_one(extend: dict[str, Any]) -> None:
    scheme = next(iter(tiny.model("llama", rope(extend)).model.position_scheme))
    reach = scheme.extension.reach(tiny.TRAINED_LENGTH)
    assert remapped_distance(extend, reach - 1, 0) <= tiny.TRAINED_LENGTH - 1
    assert remapped_distance(extend, reach, 0) > tiny.TRAINED_LENGTH - 1


@pytest.mark.parametrize("window", [tiny.TRAINED_LENGTH - 1, tiny.TRAINED_LENGTH, 10 * tiny.TRAINED_LENGTH])
@pytest.mark.parametrize("extend", [SELF_EXTEND, LEAKY, REROPE], ids=lambda extend: extend["method"])
def test_reach_of_a_window_as_long_as_the_trained_length(extend: dict[str, Any], window: int) -> None:
    """Near keys keep distances that were never trained, so the reach ends with the trained length."""
    extend = {**extend, "window": window}
    scheme = next(iter(tiny.model("llama", rope(extend)).model.position_scheme))
    distances = [remapped_distance(extend, last, 0) for last in range(20 * tiny.TRAINED_LENGTH)]
    beyond = [last for last, distance in enumerate(distances) if distance > tiny.TRAINED_LENGTH - 1]
    assert scheme.extension.reach(tiny.TRAINED_LENGTH) == (beyond[0] if beyond else None)


def test_defaults_follow_the_trained_length() -> None:
    expected = {
        "self_extend": {"window": 12, "group": 8},
        "rerope": {"window": 24},
        "leaky_rerope": {"window": 24, "k": 16.0},
        "dca": {"chunk_size": 36, "local_window": 12},
    }
    for method, options in expected.items():
        scheme = next(iter(tiny.model("llama", rope({"method": method})).model.position_scheme))
        assert vars(scheme.extension) == options
