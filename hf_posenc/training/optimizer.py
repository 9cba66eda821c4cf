"""Which parameters are trained, and how: position parameters, LoRA adapters, everything."""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from tqdm.auto import tqdm
from transformers import PreTrainedModel

from ..checkpoints import is_scheme_parameter
from ..errors import PosEncError
from ..schemes import InputScheme

ADAPTER_NAME, ADAPTER_MARK = "default", ".lora_"


def train_positions_only(model: nn.Module) -> int:
    """Freeze everything but the parameters of the position schemes.

    Args:
        model: A variant; changed in place.

    Returns:
        The number of trainable parameters.

    Raises:
        PosEncError: If the schemes have no parameters.
    """
    trainable = 0
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(is_scheme_parameter(name))
        trainable += parameter.numel() if parameter.requires_grad else 0
    if not trainable:
        raise PosEncError(
            "The position scheme has no parameters to train: train the whole model or LoRA adapters, or choose a "
            'scheme with parameters, such as {"type": "alibi", "learned": true}'
        )
    return trainable


def widen_trained_parameters(model: nn.Module) -> None:
    """Put position parameters and adapters in float32: in half precision small updates would round to nothing."""
    for name, parameter in model.named_parameters():
        if ADAPTER_MARK in name or is_scheme_parameter(name):
            parameter.data = parameter.data.to(torch.promote_types(parameter.dtype, torch.float32))


def head_names(model: PreTrainedModel) -> list[str]:
    """The names of the modules of a model's head: all its children except the base model."""
    return [name for name, _ in model.named_children() if name != model.base_model_prefix]


def scheme_parameter_ids(model: nn.Module) -> set[int]:
    """The ids of the position parameters with a learning rate of their own: those in attention."""
    ids = {id(parameter) for name, parameter in model.named_parameters() if is_scheme_parameter(name)}
    input_schemes = (module for module in model.modules() if isinstance(module, InputScheme))
    return ids - {id(parameter) for scheme in input_schemes for parameter in scheme.parameters()}


def parameter_groups(
    model: nn.Module, learning_rate: float, position_learning_rate: float | None = None, weight_decay: float = 0.0
) -> list[dict[str, Any]]:
    """Parameter groups for a torch optimizer.

    Args:
        model: A variant.
        learning_rate: Learning rate of all parameters but those of schemes in attention.
        position_learning_rate: Learning rate of those; the same if None.
        weight_decay: Weight decay. Position parameters have none: it would fade the scheme out.

    Returns:
        The groups, by learning rate and weight decay.

    Example:
        >>> optimizer = torch.optim.AdamW(parameter_groups(model, 1e-4, position_learning_rate=2e-3))
    """
    position_rate = learning_rate if position_learning_rate is None else position_learning_rate
    position_ids = scheme_parameter_ids(model)
    groups: dict[tuple[float, float], list[nn.Parameter]] = collections.defaultdict(list)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            rate = position_rate if id(parameter) in position_ids else learning_rate
            decay = 0.0 if is_scheme_parameter(name) else weight_decay
            groups[rate, decay].append(parameter)
    return [{"params": params, "lr": rate, "weight_decay": decay} for (rate, decay), params in groups.items()]


def split_parameter_group(optimizer: torch.optim.Optimizer, parameter_ids: set[int], learning_rate: float) -> None:
    """Move the parameters with these ids to a new group, with its own learning rate and no weight decay."""
    moved = []
    for group in optimizer.param_groups:
        moved += [parameter for parameter in group["params"] if id(parameter) in parameter_ids]
        group["params"] = [parameter for parameter in group["params"] if id(parameter) not in parameter_ids]
    if moved:
        optimizer.add_param_group({"params": moved, "lr": learning_rate, "weight_decay": 0.0})


def minimize(
    loss: Callable[[int], torch.Tensor], groups: list[dict[str, Any]], steps: int, label: str | None = None
) -> None:
    """Minimize a loss, given the number of the step, by Adam with a cosine schedule.

    Parameters need not require gradients; `requires_grad` is restored. A label is for the progress bar.
    """
    parameters = [parameter for group in groups for parameter in group["params"]]
    required = [parameter.requires_grad for parameter in parameters]
    with torch.enable_grad():
        for parameter in parameters:
            parameter.requires_grad_(True)
        optimizer = torch.optim.Adam(groups)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
        for step in tqdm(range(steps), desc=label, unit="step", disable=label is None):
            value = loss(step)
            if not value.requires_grad:  # it does not depend on the parameters
                break
            optimizer.zero_grad()
            value.backward()
            optimizer.step()
            scheduler.step()
    for parameter, requires_grad in zip(parameters, required, strict=True):
        parameter.requires_grad_(requires_grad)
        parameter.grad = None


def add_lora(model: PreTrainedModel, rank: int, exclude: list[str]) -> None:
    """Add LoRA adapters to every linear layer but those named, and train only them and the positions."""
    try:
        from peft import LoraConfig
        from peft.tuners.lora import LoraModel
    except ImportError as error:
        raise PosEncError("--trainable lora requires PEFT: pip install peft") from error
    # Injected rather than wrapped around the model, and merged on saving: checkpoints load like any others.
    config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", exclude_modules=exclude or None)
    LoraModel(model, {ADAPTER_NAME: config}, ADAPTER_NAME)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(ADAPTER_MARK in name or is_scheme_parameter(name))
    widen_trained_parameters(model)


@torch.no_grad()
def merge_adapters(model: nn.Module, state_dict: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The state dict of a model with its adapters merged into the weights; the model itself does not change."""
    base_weights = {name: weight for name, weight in state_dict.items() if ADAPTER_MARK not in name}
    merged = {name.replace(".base_layer.", "."): weight for name, weight in base_weights.items()}
    for path, module in model.named_modules():
        down = state_dict.get(f"{path}.lora_A.{ADAPTER_NAME}.weight")
        if down is not None:
            up, weight = state_dict[f"{path}.lora_B.{ADAPTER_NAME}.weight"], merged[f"{path}.weight"]
            delta = (up @ down) * module.scaling[ADAPTER_NAME]
            merged[f"{path}.weight"] = weight + (delta.T if module.fan_in_fan_out else delta).to(weight.dtype)
    return merged
