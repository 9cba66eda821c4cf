"""How fast it is trained: a rate of their own for the parameters that schemes have in attention."""

from __future__ import annotations

from typing import Any

from torch import nn

from ..schemes.mixing import InputScheme
from .parameters import is_of_scheme


def learns_faster(model: nn.Module) -> set[int]:
    """By identity: the parameters of schemes but for those that words run through, which are not new to the model."""
    own = {id(parameter) for name, parameter in model.named_parameters() if is_of_scheme(name)}
    mixes = (module for module in model.modules() if isinstance(module, InputScheme))
    return own - {id(parameter) for module in mixes for parameter in module.parameters()}


def parameter_groups(
    model: nn.Module, learning_rate: float, position_learning_rate: float | None = None, weight_decay: float = 0.0
) -> list[dict[str, Any]]:
    """Groups for an optimizer: those of schemes in attention have a rate of their own, and nothing of a scheme decays,
    which would fade it."""
    rate = learning_rate if position_learning_rate is None else position_learning_rate
    rest: dict[str, Any] = {"params": [], "lr": learning_rate, "weight_decay": weight_decay}
    mixes: dict[str, Any] = {"params": [], "lr": learning_rate, "weight_decay": 0.0}
    own: dict[str, Any] = {"params": [], "lr": rate, "weight_decay": 0.0}
    faster = learns_faster(model)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            group = own if id(parameter) in faster else mixes if is_of_scheme(name) else rest
            group["params"].append(parameter)
    return [group for group in (rest, mixes, own) if group["params"]]


def set_apart(optimizer: Any, own: set[int], learning_rate: float) -> None:
    """Move the parameters with these ids into a group of their own, with a rate of its own and no decay."""
    apart = []
    for group in optimizer.param_groups:
        apart += [parameter for parameter in group["params"] if id(parameter) in own]
        group["params"] = [parameter for parameter in group["params"] if id(parameter) not in own]
    if apart:
        optimizer.add_param_group({"params": apart, "lr": learning_rate, "weight_decay": 0.0})
