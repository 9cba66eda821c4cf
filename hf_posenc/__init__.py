"""Change the positional encoding of transformers checkpoints through one config field.

Example:
    >>> import hf_posenc
    >>> from transformers import AutoModelForCausalLM
    >>> model = AutoModelForCausalLM.from_pretrained("openai-community/gpt2", position_scheme="rope")
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .patches.import_hooks import install

if TYPE_CHECKING:
    from .checkpoints import Conversion as Conversion
    from .checkpoints import Export as Export
    from .checkpoints import convert_checkpoint as convert_checkpoint
    from .checkpoints import export_checkpoint as export_checkpoint
    from .checkpoints import inspect_checkpoint as inspect_checkpoint
    from .errors import PosEncError as PosEncError
    from .evaluation.run import evaluate as evaluate
    from .hub import PushResult as PushResult
    from .hub import push_directory as push_directory
    from .patches import explain as explain
    from .patches import patched as patched
    from .patches import restore as restore
    from .patches import retrofit as retrofit
    from .patches import set_max_length as set_max_length
    from .patches import support as support
    from .registry import list_schemes as list_schemes
    from .registry import register_scheme as register_scheme
    from .training import fit as fit

__version__ = "0.1.0"

# Where the public names live. Resolved on first use, because these modules import torch and transformers.
_PUBLIC = {
    "checkpoints": ["Conversion", "Export", "convert_checkpoint", "export_checkpoint", "inspect_checkpoint"],
    "errors": ["PosEncError"],
    "evaluation.run": ["evaluate"],
    "hub": ["PushResult", "push_directory"],
    "patches": ["explain", "patched", "restore", "retrofit", "set_max_length", "support"],
    "registry": ["list_schemes", "register_scheme"],
    "training": ["fit"],
}
_MODULES = {name: module for module, names in _PUBLIC.items() for name in names}
_SUBPACKAGES = ("analysis", "checkpoints", "evaluation", "models", "patches", "plots", "schemes", "training")
__all__ = sorted(_MODULES)


def __getattr__(name: str) -> Any:
    if name in _SUBPACKAGES:
        return import_module(f".{name}", __name__)
    if name in _MODULES:
        return getattr(import_module(f".{_MODULES[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])


install()
