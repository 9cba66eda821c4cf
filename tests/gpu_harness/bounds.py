"""Makes Triton's interpreter check that kernels read and write inside of their tensors, as compute-sanitizer does."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
from triton.runtime.interpreter import InterpreterBuilder

ACCESSES = {"create_masked_load": 1, "create_masked_store": 2, "create_atomic_rmw": 3}
"""The operations that access memory, each with the position of its mask among the arguments."""


class OutOfBoundsError(Exception):
    """A kernel accessed memory outside of its tensors."""


class _Allowed:
    """The first and last addresses of tensors, in ascending order."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        spans = sorted(map(_span, tensors))
        self.first = np.array([first for first, _ in spans], dtype=np.uint64)
        self.last = np.maximum.accumulate(np.array([last for _, last in spans], dtype=np.uint64))

    def check(self, addresses: np.ndarray, mask: np.ndarray) -> None:
        addresses, mask = np.broadcast_arrays(addresses, mask)
        used = addresses[mask]
        if not used.size:
            return
        index = np.searchsorted(self.first, used, side="right") - 1
        outside = (index < 0) | (used > self.last[np.maximum(index, 0)])
        if outside.any():
            raise OutOfBoundsError(f"{int(outside.sum())} of {used.size} addresses are outside of all tensors")


_allowed: list[_Allowed] = []


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """The addresses of the first and last element."""
    steps = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + steps * tensor.element_size()


@contextlib.contextmanager
def within(arguments: Iterable[Any]) -> Iterator[None]:
    """Within it, kernels may access only the tensors among the arguments."""
    _allowed.append(_Allowed(value for value in arguments if isinstance(value, torch.Tensor) and value.numel()))
    try:
        yield
    finally:
        _allowed.pop()


def check_accesses() -> None:
    """Check the accesses of all kernels in this process that run under `within`."""
    for name, mask_index in ACCESSES.items():
        setattr(InterpreterBuilder, name, _checked(getattr(InterpreterBuilder, name), mask_index))


def _checked(operation: Callable[..., Any], mask_index: int) -> Callable[..., Any]:
    pointer_index = 1 if operation.__name__ == "create_atomic_rmw" else 0

    @functools.wraps(operation)
    def checked(self: Any, *args: Any, **kwargs: Any) -> Any:
        if _allowed:
            _allowed[-1].check(args[pointer_index].data, args[mask_index].data)
        return operation(self, *args, **kwargs)

    return checked
