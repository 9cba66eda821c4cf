"""Record the size of the largest tensor in a computation, or of all tensors at once, forward and backward."""

from __future__ import annotations

import weakref
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


class PeakBytes(TorchDispatchMode):
    """Tracks how many bytes the tensors made by operations hold at once. What existed before does not count."""

    def __init__(self, *existing: torch.Tensor) -> None:
        super().__init__()
        self.live, self.peak = 0, 0
        self._storages = {tensor.untyped_storage()._cdata for tensor in existing}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self._count(tensor.untyped_storage())
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._storages:
            return

        def free() -> None:
            self.live -= size
            self._storages.discard(key)

        self._storages.add(key)
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, free)
