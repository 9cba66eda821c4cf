"""bfloat16 in Triton's interpreter, against torch on CPU tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder

SIZE = 16


@triton.jit
def compute(a_pointer: Any, b_pointer: Any, out_pointer: Any, SIZE: tl.constexpr, OPERATION: tl.constexpr) -> None:
    offsets = tl.arange(0, SIZE)[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    a, b = tl.load(a_pointer + offsets), tl.load(b_pointer + offsets)
    if OPERATION == "product":
        result = tl.dot(a, b)
    elif OPERATION == "sum":
        result = a + b
    elif OPERATION == "round":
        result = (a.to(tl.float32) * b.to(tl.float32)).to(tl.bfloat16)
    elif OPERATION == "compare":
        result = tl.where(a < b, 1.0, 0.0)
    else:
        result = (a * 8).to(tl.int32)
    tl.store(out_pointer + offsets, result)


OPERATIONS = {
    "product": lambda a, b: a.float() @ b.float(),
    "sum": lambda a, b: a + b,
    "round": lambda a, b: (a.float() * b.float()).bfloat16(),
    "compare": lambda a, b: (a < b).float(),
    "integer": lambda a, b: (a * 8).int(),
}


def run(operation: str) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    a, b = torch.randn(2, SIZE, SIZE, generator=generator).bfloat16()
    expected = OPERATIONS[operation](a, b)
    result = torch.empty_like(expected)
    compute[(1,)](a, b, result, SIZE, operation)
    return result, expected


@pytest.mark.parametrize("operation", OPERATIONS)
def test_operations_match_torch(operation: str) -> None:
    result, expected = run(operation)
    # sums of products in another order; everything else is exact
    torch.testing.assert_close(result, expected, rtol=0, atol=1e-5 if operation == "product" else 0)


@pytest.mark.parametrize(("operation", "method"), [("product", "create_dot"), ("sum", "binary_op")])
def test_the_uncorrected_interpreter_is_wrong(operation: str, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(InterpreterBuilder, method, getattr(InterpreterBuilder, method).__wrapped__)
    result, expected = run(operation)
    # A wide tolerance makes this control stricter: the results must be far apart, not just rounded.
    assert not torch.allclose(result.float(), expected.float(), atol=1e-2)
