"""Models that tensor parallelism divides among processes: what holds for a whole model, not for one layer."""

from __future__ import annotations

from torch import nn

from hf_posenc.attention import broadcast_parameters
from hf_posenc.errors import PosEncError

from .compat import find_process_rank


def share_scheme_weights(base: nn.Module) -> None:
    """Make processes agree on the scheme parameters of a base model: each may have drawn its own random ones.

    Does nothing if the model is not divided.
    """
    process = find_process_rank(base)
    if process is not None:
        named = base.named_parameters()
        broadcast_parameters([weight for name, weight in named if "position_scheme" in name.split(".")], process)


def check_undivided(model: nn.Module, purpose: str) -> None:
    """Raise PosEncError if this process has only a part of a model's weights.

    Args:
        model: Any model.
        purpose: What needs the whole model, to begin the message with.
    """
    if find_process_rank(model) is not None:
        raise PosEncError(
            f"{purpose} needs all attention heads in one process, but this model is divided by tensor parallelism: "
            "load it without tp_plan"
        )
