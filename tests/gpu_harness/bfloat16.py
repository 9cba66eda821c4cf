"""Corrects bfloat16 in Triton's interpreter.

NumPy has no bfloat16, so the interpreter keeps the bits as uint16, and some of its operations take them for integers:
products of matrices and arithmetic. Here they compute in float32 and round to nearest even, as a GPU does. Atomic
operations on bfloat16 are refused.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle, _get_np_dtype


def to_float32(bits: np.ndarray) -> np.ndarray:
    """The values of bfloat16 numbers given as bits."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def to_bits(values: np.ndarray) -> np.ndarray:
    """Numbers rounded to bfloat16, as bits."""
    tensor = torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32))
    return tensor.bfloat16().view(torch.uint16).numpy().reshape(values.shape)


def correct_interpreter() -> None:
    """Correct the interpreter of this process."""
    InterpreterBuilder.get_bf16 = _constant
    InterpreterBuilder.create_dot = _in_float32(InterpreterBuilder.create_dot)
    for name in ("unary_op", "binary_op", "create_fma", "create_rsqrt", "create_erf"):
        setattr(InterpreterBuilder, name, _in_float32(getattr(InterpreterBuilder, name)))
    InterpreterBuilder.cast_impl = _cast(InterpreterBuilder.cast_impl)
    InterpreterBuilder.create_fp_to_fp = _cast(InterpreterBuilder.create_fp_to_fp)
    InterpreterBuilder.create_atomic_rmw = _refuse(InterpreterBuilder.create_atomic_rmw)


def is_bfloat16(handle: Any) -> bool:
    return isinstance(handle, TensorHandle) and handle.dtype.scalar == tl.bfloat16


def widen(handle: Any) -> Any:
    """The handle in float32 if it is bfloat16, unchanged otherwise."""
    return TensorHandle(to_float32(handle.data), tl.float32) if is_bfloat16(handle) else handle


def _constant(self: Any, value: float) -> TensorHandle:
    """A number in the code, which the interpreter cannot make bfloat16."""
    return TensorHandle(to_bits(np.array([value])), tl.bfloat16)


def _in_float32(operation: Callable[..., TensorHandle]) -> Callable[..., TensorHandle]:
    """The operation on float32 numbers, with the result rounded if it would be bfloat16."""

    @functools.wraps(operation)
    def corrected(self: Any, *args: Any) -> TensorHandle:
        if not any(map(is_bfloat16, args)):
            return operation(self, *args)
        result = operation(self, *map(widen, args))
        is_number = result.dtype.scalar == tl.float32 and result.data.dtype != np.bool_
        accumulates = operation.__name__ == "create_dot" and not is_bfloat16(args[2])
        return TensorHandle(to_bits(result.data), tl.bfloat16) if is_number and not accumulates else result

    return corrected


def _cast(operation: Callable[..., TensorHandle]) -> Callable[..., TensorHandle]:
    @functools.wraps(operation)
    def corrected(self: Any, source: TensorHandle, target: Any, *rest: Any) -> TensorHandle:
        to_bfloat16 = target.scalar == tl.bfloat16
        if is_bfloat16(source) and to_bfloat16:
            return source
        if to_bfloat16:
            return TensorHandle(to_bits(source.data), tl.bfloat16)
        if is_bfloat16(source):
            return TensorHandle(to_float32(source.data).astype(_get_np_dtype(target)), target.scalar)
        return operation(self, source, target, *rest)

    return corrected


def _refuse(operation: Callable[..., TensorHandle]) -> Callable[..., TensorHandle]:
    @functools.wraps(operation)
    def corrected(self: Any, kind: Any, pointer: Any, value: Any, *rest: Any) -> TensorHandle:
        if is_bfloat16(value):
            raise NotImplementedError("atomic operations on bfloat16 are not interpreted")
        return operation(self, kind, pointer, value, *rest)

    return corrected
