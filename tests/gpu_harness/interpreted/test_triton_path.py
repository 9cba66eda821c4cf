"""Models that take the package's Triton kernels, through dispatch, against eager attention."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import torch
from triton.runtime.interpreter import InterpreterBuilder

from hf_posenc.attention import dispatch, triton_bias
from hf_posenc.attention.dispatch import FLEX_SETTING
from hf_posenc.attention.triton_bias import Tiling
from hf_posenc.attention.triton_support import TRITON_SETTING
from tests.gpu_harness import bounds, speed
from tests.gpu_harness.interpreted.comparison import Result, Situation, run_kernels, wrong

T5 = {"type": "t5", "num_buckets": 8, "max_distance": 20}
KERNELS = ["forward_kernel", "backward_query_kernel", "backward_key_kernel", "backward_bias_kernel"]
ROWS = [
    (Situation("llama", "plain"), T5),
    (Situation("llama", "padded"), {"type": "alibi", "learned": True}),
    (Situation("llama", "packed"), "kerple"),
    (Situation("llama", "packed", torch.bfloat16), T5),
    (Situation("bert", "padded"), T5),
    (Situation("bert", "plain", torch.bfloat16), T5),
]
"""Not kerple in bfloat16, whose gradient is two numbers: which path rounds them best is luck. In `test_triton_bias.py`,
the gradient of a bias in half precision is compared at the inputs of the kernels, where it is exact."""


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Switch the kernels on, for inputs of any size. The names of those that ran."""
    names: list[str] = []
    launch = triton_bias._launch

    def checked(kernel: Any, num_programs: int, tiling: Tiling, tensors: Any, *args: Any) -> None:
        names.append(kernel.fn.__name__)
        with bounds.within(tensors), speed.patch_once():
            launch(kernel, num_programs, tiling, tensors, *args)

    monkeypatch.setattr(triton_bias, "_launch", checked)
    monkeypatch.setattr(dispatch, "runs_flex_kernels", lambda device: True)
    monkeypatch.setenv(FLEX_SETTING, "0")
    monkeypatch.setenv(TRITON_SETTING, "1")
    return names


def run_triton(situation: Situation, model: Any) -> Result:
    """Run the model with `sdpa`, which takes the kernels."""
    model.set_attn_implementation("sdpa")
    return situation.run(model)


@pytest.mark.parametrize(("situation", "scheme"), ROWS, ids=str)
def test_kernels_match_eager_attention(situation: Situation, scheme: Any, launched: list[str]) -> None:
    assert wrong(situation, scheme, run=run_triton) == {}
    assert launched == KERNELS


def test_another_model_is_caught(launched: list[str]) -> None:
    situation = Situation("llama", "packed")
    model = situation.build(T5)
    (table,) = [parameter for name, parameter in model.named_parameters() if "position_scheme" in name]
    with torch.no_grad():
        table[0] += 0.3
    assert "logits" in wrong(situation, T5, model, run=run_triton)


def test_checkpointing_drops_the_same_weights_again(launched: list[str]) -> None:
    """The backward pass runs the layer a second time."""
    situation = Situation("llama", "packed")
    gradients = []
    for checkpointing in (False, True):
        model = situation.build(T5).train()
        model.config.attention_dropout = model.model.layers[0].self_attn.attention_dropout = 0.3
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        torch.manual_seed(3)
        gradients.append(run_triton(situation, model).gradients)
    assert launched.count("forward_kernel") == 3
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, rtol=0, atol=0)


def test_few_atomic_additions(launched: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    additions: list[int] = []
    atomic = InterpreterBuilder.create_atomic_rmw

    @functools.wraps(atomic)
    def counted(self: Any, kind: Any, pointer: Any, value: Any, mask: Any, *rest: Any) -> Any:
        additions.append(int(np.count_nonzero(np.broadcast_to(mask.data, pointer.data.shape))))
        return atomic(self, kind, pointer, value, mask, *rest)

    monkeypatch.setattr(InterpreterBuilder, "create_atomic_rmw", counted)
    situation = Situation("llama", "plain")
    model = situation.build(T5)
    run_triton(situation, model)
    ours = sum(additions)
    additions.clear()
    run_kernels(situation, model)
    assert 0 < ours < sum(additions) / 20, (ours, sum(additions))
