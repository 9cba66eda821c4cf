"""The state of a training run as safetensors and JSON: nothing in a checkpoint is a pickle.

Any nesting of dicts and lists becomes one file of tensors, with the nesting itself as JSON in its header.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file

_TENSOR, _STRUCTURE = "__tensor__", "structure"


def write_state(state: Any, path: Path) -> None:
    tensors: dict[str, torch.Tensor] = {}
    structure = _without_tensors(state, tensors)
    save_file(tensors, path, metadata={_STRUCTURE: json.dumps(structure)})


def read_state(path: Path) -> Any:
    with safe_open(path, "pt") as file:
        structure = json.loads((file.metadata() or {})[_STRUCTURE])
        return _with_tensors(structure, file)


def _without_tensors(value: Any, tensors: dict[str, torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        name = str(len(tensors))
        tensors[name] = value.detach().cpu().contiguous().clone()  # safetensors takes no two views of one storage
        return {_TENSOR: name}
    if isinstance(value, dict):
        return {"keys": [_key(key) for key in value], "values": [_without_tensors(v, tensors) for v in value.values()]}
    if isinstance(value, (list, tuple)):
        return [_without_tensors(item, tensors) for item in value]
    if isinstance(value, np.generic):
        return value.item()
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise TypeError(f"a {type(value).__name__} cannot be kept in a checkpoint")


def _key(key: Any) -> Any:
    if not isinstance(key, (str, int)):
        raise TypeError(f"a key of type {type(key).__name__} cannot be kept in a checkpoint")
    return key


def _with_tensors(value: Any, file: Any) -> Any:
    if isinstance(value, dict):
        if _TENSOR in value:
            return file.get_tensor(value[_TENSOR])
        return dict(zip(value["keys"], (_with_tensors(item, file) for item in value["values"]), strict=True))
    if isinstance(value, list):
        return [_with_tensors(item, file) for item in value]
    return value


def random_state() -> dict[str, Any]:
    """Of all generators that training draws from."""
    kind, keys, *rest = np.random.get_state(legacy=True)
    accelerator = _accelerator()
    return {
        "python": random.getstate(),
        "numpy": [kind, torch.from_numpy(np.asarray(keys, dtype=np.int64)), *rest],
        "cpu": torch.get_rng_state(),
        "device": accelerator.get_rng_state() if accelerator is not None else None,
    }


def set_random_state(state: dict[str, Any]) -> None:
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(state["cpu"])
    accelerator = _accelerator()
    if state["device"] is not None and accelerator is not None:
        accelerator.set_rng_state(state["device"])


def _accelerator() -> Any:
    """The module of torch for the kind of device that there is beside the CPU, such as torch.cuda."""
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return getattr(torch, found.type) if found is not None else None
