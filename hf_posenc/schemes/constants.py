"""Numbers that are the same in every forward pass, as tensors that are copied to each device once.

A copy from the host in every forward pass would wait for the device, and keeps CUDA graphs from being captured. They
are no buffers: `from_pretrained` would leave those uninitialized, and `model.to(dtype)` would round them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .inputs import is_tracing

CACHE_SIZE = 256
_constants: dict[tuple[tuple[float, ...], torch.device, torch.dtype], torch.Tensor] = {}


def device_constant(values: Sequence[float], device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """Return numbers as a tensor on a device. The tensor is shared: do not change it.

    Args:
        values: The numbers.
        device: Where they are needed.
        dtype: Their dtype.

    Returns:
        The same tensor in every call; in exported programs, a constant of the program.
    """
    if is_tracing() and not torch.compiler.is_dynamo_compiling():  # exported with fake tensors, which must not stay
        return torch.tensor(values, device=device, dtype=dtype)
    constant: torch.Tensor = _constant(tuple(values), device, dtype)
    return constant


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _constant(values: tuple[float, ...], device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    key = (values, device, dtype)
    if key not in _constants:
        with torch.inference_mode(False):  # an inference tensor could not be used in training later
            tensor = torch.tensor(values, device=device, dtype=dtype)
        if type(tensor) is not torch.Tensor:  # a fake tensor, of no use outside its mode
            return tensor
        if len(_constants) >= CACHE_SIZE:
            _constants.clear()
        _constants[key] = tensor
    return _constants[key]
