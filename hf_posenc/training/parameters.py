"""What is trained: the parameters of position schemes, and those that the checkpoint brought."""

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


def heads_of(model: Any) -> list[str]:
    """Names of what a model has around its base."""
    return [name for name, _ in model.named_children() if name != model.base_model_prefix]
