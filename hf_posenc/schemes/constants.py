"""Numbers that are the same in every forward pass, as tensors that are copied to each device once.

A copy from the host in every forward pass would wait for the device, and keeps CUDA graphs from being captured. They
are no buffers: `from_pretrained` would leave those uninitialized, and `model.to(dtype)` would round them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch

from .inputs import is_tracing

CACHE_SIZE = 256


class _Constants:
    """The tensors that were made so far, as attributes: a compiled model reads and guards only those that it uses."""


_constants = _Constants()
_names: dict[tuple[Hashable, ...], str] = {}
_is_strict_export: Callable[[], bool] = getattr(torch.compiler, "is_exporting", lambda: False)  # torch 2.6 lacks it
_numbers = itertools.count()
"""Names are never used again: a compiled model would take another tensor of the same size for its own."""


def device_constant(values: Sequence[float], device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """Return numbers as a tensor on a device. The tensor is shared: do not change it.

    Args:
        values: The numbers.
        device: Where they are needed.
        dtype: Their dtype.

    Returns:
        The same tensor in every call; in exported programs, a constant of the program.
    """
    return computed_constant(list, tuple(values), device, dtype)


def computed_constant(
    compute: Callable[[Any], Sequence[Any]], argument: Hashable, device: torch.device, dtype: torch.dtype
) -> torch.Tensor:
    """As `device_constant`, for many numbers that a function computes from an argument, once for each device and dtype.

    Args:
        compute: The function, which returns a list of numbers or of lists.
        argument: Its argument.
        device: Where the numbers are needed.
        dtype: Their dtype.

    Returns:
        The same tensor in every call.
    """
    name = None if _is_exporting() else _stored_name(compute, argument, device, dtype)
    if name is None:
        return torch.tensor(compute(argument), device=device, dtype=dtype)
    constant: torch.Tensor = getattr(_constants, name)
    return constant


def _is_exporting() -> bool:
    """Whether tensors are fake ones that must not stay, or would be inputs of a program that has none."""
    if torch.compiler.is_dynamo_compiling():
        return _is_strict_export()
    return is_tracing()


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _stored_name(
    compute: Callable[[Any], Sequence[Any]], argument: Hashable, device: torch.device, dtype: torch.dtype
) -> str | None:
    """Make the tensor if there is none yet, and return its name; None for a fake tensor, of no use outside its mode.

    This returns a name and not the tensor, because torch.compile would give all tensors from here the same source, and
    fail on a graph with two of them.
    """
    key = (compute, argument, device, dtype)
    if key not in _names:
        with torch.inference_mode(False):  # an inference tensor could not be used in training later
            tensor = torch.tensor(compute(argument), device=device, dtype=dtype)
        if type(tensor) is not torch.Tensor:
            return None
        if len(_names) >= CACHE_SIZE:
            _names.clear()
            vars(_constants).clear()
        _names[key] = f"constant_{next(_numbers)}"
        setattr(_constants, _names[key], tensor)
    return _names[key]
