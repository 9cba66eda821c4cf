"""Everything that reaches into transformers: one file per architecture, and the helpers that change live models.

Import it as `hf_posenc.patches`; the folder is at the top of the repository so that it is easy to find.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if __name__ != "hf_posenc.patches":
    raise ImportError(f"this package is hf_posenc.patches; it cannot be imported as {__name__!r}")

if TYPE_CHECKING:
    from .architecture import Architecture as Architecture
    from .explanation import explain as explain
    from .live_models import ARCHITECTURES as ARCHITECTURES
    from .live_models import patched as patched
    from .live_models import restore as restore
    from .live_models import retrofit as retrofit

# Resolved on first use: `import hf_posenc` imports this package for its import hooks and must stay cheap.
_MODULES = {
    "ARCHITECTURES": "live_models",
    "Architecture": "architecture",
    "explain": "explanation",
    "patched": "live_models",
    "restore": "live_models",
    "retrofit": "live_models",
}
__all__ = ["ARCHITECTURES", "Architecture", "explain", "patched", "restore", "retrofit"]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_MODULES[name]}", __name__), name)
