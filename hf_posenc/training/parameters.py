"""What is trained, and how fast: the parameters of position schemes, and those the checkpoint brought."""

from __future__ import annotations

from typing import Any

from torch import nn


def is_of_scheme(name: str) -> bool:
    return "position_scheme." in name


def train_positions_only(model: nn.Module) -> int:
    """Freeze everything but the parameters of the model's position schemes; how many numbers these are."""
    trained = 0
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(is_of_scheme(name))
        trained += parameter.numel() if is_of_scheme(name) else 0
    if not trained:
        raise ValueError(
            "the position scheme has no parameters, so that there is nothing to train: train the whole model, or use "
            "LoRA, or a scheme that has some (alibi has with learned=True)"
        )
    return trained


def parameter_groups(
    model: nn.Module, learning_rate: float, position_learning_rate: float | None = None, weight_decay: float = 0.0
) -> list[dict[str, Any]]:
    """Groups for an optimizer: those of schemes with a rate of their own and no decay, which would fade them."""
    own: list[nn.Parameter] = []
    rest: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            (own if is_of_scheme(name) else rest).append(parameter)
    rate = learning_rate if position_learning_rate is None else position_learning_rate
    groups = [
        {"params": rest, "lr": learning_rate, "weight_decay": weight_decay},
        {"params": own, "lr": rate, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def set_apart(optimizer: Any, own: set[int], learning_rate: float) -> None:
    """Move the parameters with these ids into a group of their own, with a rate of its own and no decay."""
    apart = []
    for group in optimizer.param_groups:
        apart += [parameter for parameter in group["params"] if id(parameter) in own]
        group["params"] = [parameter for parameter in group["params"] if id(parameter) not in own]
    if apart:
        optimizer.add_param_group({"params": apart, "lr": learning_rate, "weight_decay": 0.0})
