"""Low-rank adapters beside the parameters of positions, through PEFT.

The adapters are put into the model rather than around it: checkpoints hold everything, the parameters of positions
too, and what comes out in the end is the model itself, with the adapters merged into its weights.
"""

from __future__ import annotations

from typing import Any

from .parameters import is_of_scheme

NAME = "default"


def add_lora(model: Any, rank: int) -> Any:
    """Adapters on every linear layer but the head; only they and the positions are trained. What takes them out again
    is the `merge_and_unload()` of what is returned."""
    try:
        from peft import LoraConfig
        from peft.tuners.lora import LoraModel
    except ImportError as error:
        raise ValueError("--train lora needs PEFT: pip install peft") from error
    config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear")
    tuner = LoraModel(model, {NAME: config}, NAME)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name or is_of_scheme(name))
    return tuner
