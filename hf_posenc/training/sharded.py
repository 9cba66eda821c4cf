"""The state of a model that FSDP2 has sharded: gathered by name on the first process, and given back to all."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

_GATHERED = StateDictOptions(full_state_dict=True, cpu_offload=True)


def gathered_weights(model: Any) -> dict[str, Any]:
    """Whole tensors, on the first process; every process has to ask. What is tied to another is left out."""
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    found = get_model_state_dict(model, options=_GATHERED)
    return {name: weight for name, weight in found.items() if tied.get(name) not in found}


def gathered_optimizer(model: Any, optimizer: Any) -> dict[str, Any]:
    return get_optimizer_state_dict(model, _bare(optimizer), options=_GATHERED)


def share_out_optimizer(model: Any, optimizer: Any, state: dict[str, Any]) -> None:
    set_optimizer_state_dict(model, _bare(optimizer), state, options=StateDictOptions(full_state_dict=True))


def is_finite_everywhere(parameter: torch.Tensor) -> bool:
    """Of a sharded parameter, what this process has of it."""
    local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
    return bool(torch.isfinite(local.detach()).all())


def _bare(optimizer: Any) -> Any:
    """Without what accelerate has put around it."""
    return getattr(optimizer, "optimizer", optimizer)
