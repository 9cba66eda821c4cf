"""The variant classes by name: `from hf_posenc.models import PosEncGPT2LMHeadModel` works for every head.

Classes are created when they are asked for. Saved variants and pickles find their classes here.
"""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    from .config import unknown_variant
    from .errors import PosEncError
    from .patches.auto_classes import variant_by_name

    variant = variant_by_name(name)
    if variant is None and name.startswith("PosEnc"):
        raise PosEncError(unknown_variant(name))
    if variant is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return variant
