"""The variants as transformers knows them: every head that the Auto classes have for an architecture.

Classes are made when they are asked for: `from hf_posenc.models import PosEncGPT2LMHeadModel` works for any head.
"""

from __future__ import annotations

import threading
from typing import Any

from transformers.configuration_utils import PreTrainedConfig
from transformers.models.auto import modeling_auto
from transformers.models.auto.auto_factory import _LazyAutoMapping

from . import config as configs
from .patches import save_guard as guard
from .patches.architecture import Architecture
from .patches.live_models import ARCHITECTURES
from .patches.variants import install, variant_class

_lock = threading.RLock()
_registered: set[str] = set()


def register(stock_config: type[PreTrainedConfig]) -> None:
    """Make the variants of an architecture known to transformers' Auto classes. Acts once."""
    architecture = ARCHITECTURES[stock_config.model_type]
    with _lock:
        if architecture.model_type in _registered:
            return
        install(architecture)
        guard.install()
        variant_config = configs.variant_config_class(stock_config)
        names = {"AutoConfig": variant_config.__name__}
        for mapping in _mappings():
            if architecture.model_type in mapping._model_mapping:
                _register_in(mapping, stock_config, variant_config, architecture)
        for auto_class in vars(modeling_auto).values():
            mapping = getattr(auto_class, "_model_mapping", None) if isinstance(auto_class, type) else None
            if isinstance(mapping, _LazyAutoMapping) and variant_config in mapping._extra_content:
                found = mapping._extra_content[variant_config]
                names[auto_class.__name__] = (found[0] if isinstance(found, tuple) else found).__name__
        configs.auto_class_names[variant_config] = names
        _registered.add(architecture.model_type)


def _mappings() -> list[Any]:
    return [value for value in vars(modeling_auto).values() if isinstance(value, _LazyAutoMapping)]


def _register_in(mapping: Any, stock_config: type, variant_config: Any, architecture: Architecture) -> None:
    stock = mapping[stock_config]
    many = isinstance(stock, tuple)
    variants = tuple(variant_class(architecture, cls) for cls in (stock if many else (stock,)))
    mapping.register(variant_config, variants if many else variants[0], exist_ok=True)
    # Trainer's label smoothing and pipelines look class names up in the table of names behind the mapping.
    found = tuple(cls.__name__ for cls in variants)
    mapping._model_mapping[variant_config.model_type] = found if many else found[0]


def __getattr__(name: str) -> Any:
    if name.startswith("PosEnc"):
        stock_name = name.removeprefix("PosEnc")
        for architecture in ARCHITECTURES.values():
            stock_config = architecture.family.config_class
            if stock_name == stock_config.__name__:
                register(stock_config)
                return configs.variant_config_class(stock_config)
            module = __import__(architecture.family.__module__, fromlist=[stock_name])
            stock = getattr(module, stock_name, None)
            if isinstance(stock, type) and issubclass(stock, architecture.family):
                register(stock_config)
                return variant_class(architecture, stock)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
