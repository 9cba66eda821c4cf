"""Change the positional encoding of BERT, GPT-2 and LLaMA checkpoints through one config field.

import hf_posenc
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained("openai-community/gpt2", position_scheme="rope")
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from . import plugin

if TYPE_CHECKING:
    from .catalogue import SchemeInfo
    from .checkpoints import Conversion, convert_checkpoint
    from .evaluation.run import evaluate
    from .explanation import explain
    from .handover import Handover
    from .hub.push import Pushed, push_directory
    from .patches import patched, restore, retrofit
    from .schemes import register_scheme
    from .training.fitting import fit

    def schemes() -> dict[str, SchemeInfo]: ...


__version__ = "0.1.0"
__all__ = [
    "Conversion",
    "Handover",
    "Pushed",
    "convert_checkpoint",
    "evaluate",
    "explain",
    "fit",
    "patched",
    "push_directory",
    "register_scheme",
    "restore",
    "retrofit",
    "schemes",
]

_HOMES = {
    "Conversion": "checkpoints",
    "convert_checkpoint": "checkpoints",
    "evaluate": "evaluation.run",
    "explain": "explanation",
    "fit": "training.fitting",
    "Handover": "handover",
    "patched": "patches",
    "push_directory": "hub.push",
    "Pushed": "hub.push",
    "restore": "patches",
    "retrofit": "patches",
    "register_scheme": "schemes",
}


def __getattr__(name: str) -> Any:
    # Late, because these import torch and the models: `import hf_posenc` must cost next to nothing.
    from importlib import import_module

    if name in ("analysis", "conventions", "evaluation", "models", "patches", "plots", "schemes", "training"):
        return import_module(f".{name}", __name__)
    if name in _HOMES:
        return getattr(import_module(f".{_HOMES[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])


plugin.install()
