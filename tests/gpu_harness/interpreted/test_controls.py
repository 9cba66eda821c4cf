"""The harness catches what is wrong: kernels with a mistake, another model, lookups outside of a table."""

from __future__ import annotations

import pytest
import torch
from triton.runtime.errors import InterpreterError

from tests.gpu_harness import backend, launcher
from tests.gpu_harness.interpreted.comparison import Situation, run_kernels, wrong

SCHEME = {"type": "t5", "num_buckets": 8, "max_distance": 20}
TABLE = "position_scheme"
"""Part of the name of the table that the scheme learns."""
PLAIN = Situation("llama", "plain")
BFLOAT16 = Situation("llama", "plain", torch.bfloat16)
MISTAKES = {
    # l_i is rescaled whenever a later block of keys has a larger score
    "softmax-across-blocks": ("l_i = l_i * alpha + tl.sum(p, 1)", "l_i = l_i + tl.sum(p, 1)", PLAIN, "logits"),
    "softmax-backward": ("ds = p * (dp - Di[:, None])", "ds = p * dp", PLAIN, TABLE),
    "keys-backward": ("dsT = pT * (dpT - Di[None, :])", "dsT = pT * dpT", PLAIN, "k_proj"),
    "lost-atomics": ("scatter_mask, sem=", "scatter_mask & (offs_n2[None, :] > 0), sem=", PLAIN, TABLE),
    # a head has 279 distances
    "gradient-of-another-head": ("279*tmp", "0*tmp", PLAIN, TABLE),
    "gradient-of-another-head-bfloat16": ("279*tmp", "0*tmp", BFLOAT16, TABLE),
}


@pytest.mark.parametrize("situation", [PLAIN, BFLOAT16], ids=str)
def test_unchanged_kernels_are_right(situation: Situation) -> None:
    assert wrong(situation, SCHEME) == {}


@pytest.mark.parametrize(("old", "new", "situation", "caught"), MISTAKES.values(), ids=MISTAKES)
def test_a_kernel_made_wrong_is_caught(old: str, new: str, situation: Situation, caught: str) -> None:
    with launcher.changed_kernels(old, new):
        errors = wrong(situation, SCHEME)
    assert any(caught in name for name in errors), errors


@pytest.mark.parametrize("situation", [PLAIN, BFLOAT16], ids=str)
def test_another_table_is_caught(situation: Situation) -> None:
    model = situation.build(SCHEME)
    (table,) = [parameter for name, parameter in model.named_parameters() if TABLE in name]
    with torch.no_grad():
        table[0] += 0.3
    assert "logits" in wrong(situation, SCHEME, model)


def test_a_lookup_outside_of_a_table_is_caught() -> None:
    # the last query of the first head reads before the start of the vectors
    with (
        launcher.changed_kernels("tl.full([1], 139, tl.int32)", "tl.full([1], 138, tl.int32)"),
        pytest.raises(InterpreterError, match="OutOfBoundsError"),
    ):
        run_kernels(PLAIN, PLAIN.build(SCHEME))


def test_a_change_that_applies_to_no_kernel_fails() -> None:
    with pytest.raises(AssertionError, match="no kernel has"), launcher.changed_kernels("no such line", ""):
        pass


def test_stock_flex_attention_is_restored() -> None:
    import torch.nn.attention.flex_attention as module

    uncompiled = module.flex_attention
    with backend.gpu_kernels():
        assert module.flex_attention is not uncompiled
    assert module.flex_attention is uncompiled
