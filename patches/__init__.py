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
    from .attach import SchemePlan as SchemePlan
    from .attach import init_scheme_weights as init_scheme_weights
    from .attach import plan_schemes as plan_schemes
    from .attach import with_scheme as with_scheme
    from .attention_modules import PosEncAttention as PosEncAttention
    from .auto_classes import register_variants as register_variants
    from .explanation import Explanation as Explanation
    from .explanation import build_explanation as build_explanation
    from .explanation import explain as explain
    from .families import ARCHITECTURES as ARCHITECTURES
    from .families import find_architecture as find_architecture
    from .families import max_positions as max_positions
    from .head_layout import HeadLayout as HeadLayout
    from .head_layout import find_head_layout as find_head_layout
    from .heads import find_auto_class as find_auto_class
    from .legacy import rename_legacy_tables as rename_legacy_tables
    from .lengths import check_config_length as check_config_length
    from .lengths import check_max_length as check_max_length
    from .lengths import config_length as config_length
    from .lengths import set_config_length as set_config_length
    from .lengths import table_length as table_length
    from .live_models import architecture_of as architecture_of
    from .live_models import patched as patched
    from .live_models import restore as restore
    from .live_models import retrofit as retrofit
    from .live_models import set_max_length as set_max_length
    from .model_support import Support as Support
    from .model_support import support as support
    from .tensor_parallel import check_undivided as check_undivided
    from .unsupported import Refusal as Refusal
    from .unsupported import refusal_of as refusal_of
    from .unsupported import refuse as refuse
    from .variants import PosEncBaseModel as PosEncBaseModel
    from .variants import PosEncModel as PosEncModel
    from .variants import base_models as base_models

# Resolved on first use: `import hf_posenc` imports this package for its import hooks and must stay cheap.
_MODULES = {
    "ARCHITECTURES": "families",
    "Architecture": "architecture",
    "Explanation": "explanation",
    "HeadLayout": "head_layout",
    "PosEncAttention": "attention_modules",
    "PosEncBaseModel": "variants",
    "PosEncModel": "variants",
    "Refusal": "unsupported",
    "SchemePlan": "attach",
    "Support": "model_support",
    "architecture_of": "live_models",
    "base_models": "variants",
    "build_explanation": "explanation",
    "check_config_length": "lengths",
    "check_max_length": "lengths",
    "check_undivided": "tensor_parallel",
    "config_length": "lengths",
    "explain": "explanation",
    "find_architecture": "families",
    "find_auto_class": "heads",
    "find_head_layout": "head_layout",
    "init_scheme_weights": "attach",
    "max_positions": "families",
    "patched": "live_models",
    "plan_schemes": "attach",
    "refusal_of": "unsupported",
    "refuse": "unsupported",
    "register_variants": "auto_classes",
    "rename_legacy_tables": "legacy",
    "restore": "live_models",
    "retrofit": "live_models",
    "set_config_length": "lengths",
    "set_max_length": "live_models",
    "support": "model_support",
    "table_length": "lengths",
    "with_scheme": "attach",
}
__all__ = sorted(_MODULES)


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_MODULES[name]}", __name__), name)
