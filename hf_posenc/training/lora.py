"""Low-rank adapters beside the parameters of positions, through PEFT.

The adapters are put into the model rather than around it: checkpoints and what comes out in the end are the model
itself, with the adapters merged into its weights, so that all of them load as any. To go on from a checkpoint there
are the adapters beside it, apart.
"""

from __future__ import annotations

from typing import Any

import torch

from .parameters import is_of_scheme

NAME = "default"


def add_lora(model: Any, rank: int, apart_from: list[str]) -> None:
    """Adapters on every linear layer but those named; only they and the positions are trained."""
    try:
        from peft import LoraConfig
        from peft.tuners.lora import LoraModel
    except ImportError as error:
        raise ValueError("--train lora needs PEFT: pip install peft") from error
    config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", exclude_modules=apart_from or None)
    LoraModel(model, {NAME: config}, NAME)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(is_of_adapter(name) or is_of_scheme(name))


def is_of_adapter(name: str) -> bool:
    return ".lora_" in name


@torch.no_grad()
def merged(model: Any, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The state of a model with adapters as that of one without: added to the weights, under the plain names."""
    plain = {name.replace(".base_layer.", "."): value for name, value in state.items() if not is_of_adapter(name)}
    for path, module in model.named_modules():
        down = state.get(f"{path}.lora_A.{NAME}.weight")
        if down is not None:
            up, weight = state[f"{path}.lora_B.{NAME}.weight"], plain[f"{path}.weight"]
            added = (up @ down) * module.scaling[NAME]
            plain[f"{path}.weight"] = weight + (added.T if module.fan_in_fan_out else added).to(weight.dtype)
    return plain
