"""How large the largest tensor of a computation is, forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def kept_together(tensor: torch.Tensor) -> int:
    """The numbers in a tensor's storage: of a view, those of what it is a view of."""
    return tensor.untyped_storage().nbytes() // tensor.itemsize


class Largest(TorchDispatchMode):
    """Notes the most numbers, by the given count, of anything that an operation gives out."""

    def __init__(self, count: Callable[[torch.Tensor], int]) -> None:
        super().__init__()
        self.count, self.numbers = count, 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self.numbers = max(self.numbers, self.count(tensor))
        return result
