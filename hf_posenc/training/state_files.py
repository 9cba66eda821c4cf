"""Training state as safetensors files with JSON headers, so that nothing in a checkpoint is a pickle.

Any nesting of dicts and lists becomes one file of tensors, with the nesting as JSON in its metadata.
"""

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
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

_TENSOR, _STRUCTURE = "__tensor__", "structure"
_FULL_STATE = StateDictOptions(full_state_dict=True, cpu_offload=True)


def write_state(state: object, path: Path) -> None:
    """Write nested dicts, lists, tensors and plain values."""
    tensors: dict[str, torch.Tensor] = {}
    structure = _extract_tensors(state, tensors)
    save_file(tensors, path, metadata={_STRUCTURE: json.dumps(structure)})


def read_state(path: Path) -> Any:
    """Read what `write_state` wrote. Tuples come back as lists."""
    with safe_open(path, "pt") as file:
        return _insert_tensors(json.loads((file.metadata() or {})[_STRUCTURE]), file)


def _extract_tensors(value: object, tensors: dict[str, torch.Tensor]) -> object:
    if isinstance(value, torch.Tensor):
        name = str(len(tensors))
        tensors[name] = value.detach().cpu().contiguous().clone()  # safetensors refuses tensors that share memory
        return {_TENSOR: name}
    if isinstance(value, dict):
        assert all(isinstance(key, (str, int)) for key in value)
        # JSON would turn integer keys into strings.
        return {"keys": list(value), "values": [_extract_tensors(item, tensors) for item in value.values()]}
    if isinstance(value, (list, tuple)):
        return [_extract_tensors(item, tensors) for item in value]
    if isinstance(value, np.generic):
        return value.item()
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise TypeError(f"Cannot write a {type(value).__name__} to a checkpoint")


def _insert_tensors(value: object, file: safe_open) -> object:
    if isinstance(value, dict):
        if _TENSOR in value:
            return file.get_tensor(value[_TENSOR])
        return dict(zip(value["keys"], (_insert_tensors(item, file) for item in value["values"]), strict=True))
    if isinstance(value, list):
        return [_insert_tensors(item, file) for item in value]
    return value


def get_rng_state() -> dict[str, Any]:
    """The state of all random number generators that training uses."""
    kind, keys, *rest = np.random.get_state(legacy=True)
    device_module = _device_module()
    return {
        "python": random.getstate(),
        "numpy": [kind, torch.from_numpy(np.asarray(keys, dtype=np.int64)), *rest],
        "cpu": torch.get_rng_state(),
        "device": device_module.get_rng_state() if device_module is not None else None,
    }


def set_rng_state(state: dict[str, Any]) -> None:
    """Restore the state that `get_rng_state` returned."""
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(state["cpu"])
    device_module = _device_module()
    if state["device"] is not None and device_module is not None:
        device_module.set_rng_state(state["device"])


def _device_module() -> ModuleType | None:
    """torch's module for the accelerator in use, such as torch.cuda."""
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return getattr(torch, device.type) if device is not None else None


def gather_weights(model: nn.Module) -> dict[str, Any]:
    """The full weights of a model sharded by FSDP2, on the main process; all processes must call it."""
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    weights = get_model_state_dict(model, options=_FULL_STATE)
    return {name: weight for name, weight in weights.items() if tied.get(name) not in weights}


def gather_optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The full optimizer state of a sharded model, by parameter name; all processes must call it."""
    return get_optimizer_state_dict(model, getattr(optimizer, "optimizer", optimizer), options=_FULL_STATE)


def scatter_optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Restore what `gather_optimizer_state` returned."""
    unwrapped = getattr(optimizer, "optimizer", optimizer)  # without accelerate's wrapper
    set_optimizer_state_dict(model, unwrapped, state, options=StateDictOptions(full_state_dict=True))
