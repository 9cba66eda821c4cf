"""Record the size of the largest tensor in a computation, forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def storage_size(tensor: torch.Tensor) -> int:
    """The number of elements in a tensor's storage; for a view, that of its base."""
    return tensor.untyped_storage().nbytes() // tensor.itemsize


class LargestTensor(TorchDispatchMode):
    """Tracks the largest output of any operation, as measured by `size`."""

    def __init__(self, size: Callable[[torch.Tensor], int]) -> None:
        super().__init__()
        self.size, self.numbers = size, 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self.numbers = max(self.numbers, self.size(tensor))
        return result
