"""The state of optimizers, schedulers and random number generators, as safetensors files instead of pickles."""

from __future__ import annotations

import json
import random
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch.utils._pytree import tree_flatten, tree_unflatten, treespec_dumps, treespec_loads


def write_state(state: object, path: Path) -> None:
    """Write nested dicts, lists, tuples, tensors and plain values as a safetensors file with a JSON header."""
    leaves, structure = tree_flatten(state)
    tensors = {str(index): leaf for index, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)}
    values = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    # safetensors refuses tensors that share memory
    copies = {index: tensor.detach().cpu().contiguous().clone() for index, tensor in tensors.items()}
    save_file(copies, path, metadata={"structure": treespec_dumps(structure), "values": json.dumps(values)})


def read_state(path: Path) -> Any:
    """Read what `write_state` wrote."""
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
        leaves = json.loads(metadata["values"])
        for index in file.keys():  # noqa: SIM118
            leaves[int(index)] = file.get_tensor(index)
    return tree_unflatten(leaves, treespec_loads(metadata["structure"]))


def get_rng_state() -> dict[str, Any]:
    """The state of all random number generators that training uses."""
    kind, keys, *rest = np.random.get_state(legacy=True)
    device_module = _device_module()
    return {
        "python": random.getstate(),
        "numpy": (kind, torch.from_numpy(keys), *rest),
        "cpu": torch.get_rng_state(),
        "device": device_module.get_rng_state() if device_module is not None else None,
    }


def set_rng_state(state: dict[str, Any]) -> None:
    """Restore the state that `get_rng_state` returned."""
    random.setstate(state["python"])
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, keys.numpy(), *rest))
    torch.set_rng_state(state["cpu"])
    device_module = _device_module()
    if state["device"] is not None and device_module is not None:
        device_module.set_rng_state(state["device"])


def _device_module() -> ModuleType | None:
    """torch's module for the accelerator in use, such as torch.cuda."""
    return torch.get_device_module() if torch.accelerator.is_available() else None
