"""Registration of the variants with transformers' Auto classes: every head that an architecture has there."""

from __future__ import annotations

import sys
import threading
from typing import Any

from transformers.configuration_utils import PreTrainedConfig

from hf_posenc.config import auto_class_names, variant_config_class
from hf_posenc.model_types import config_module

from .attention_modules import attention_class, cross_attention_class, layer_class
from .compat import (
    auto_mappings,
    mapping_of_auto_class,
    register_in_mapping,
    registered_auto_classes,
    share_weight_conversions,
    unregister_in_mapping,
    unshare_weight_conversions,
)
from .families import ARCHITECTURES
from .saving import install_save_guard
from .variants import forget_variant_classes, install_variants, variant_class

_lock = threading.RLock()


def register_variants(stock_config: type[PreTrainedConfig]) -> None:
    """Register the variants of an architecture with the Auto classes. Idempotent."""
    architecture, config_class = ARCHITECTURES[stock_config.model_type], variant_config_class(stock_config)
    with _lock:
        if config_class in auto_class_names:
            return
        install_variants()
        install_save_guard()
        class_names: dict[str, str] = {}
        heads: list[tuple[Any, Any]] = [
            (mapping_of_auto_class(name), stock_class) for name, stock_class in architecture.own_heads
        ]
        heads += [(mapping, mapping[stock_config]) for mapping in auto_mappings(stock_config)]
        for mapping, stock_classes in heads:
            stock_classes = stock_classes if isinstance(stock_classes, tuple) else (stock_classes,)
            variants = tuple(variant_class(architecture, cls) for cls in stock_classes)
            register_in_mapping(mapping, config_class, variants)
            class_names.update(
                {cls.__name__: variant.__name__ for cls, variant in zip(stock_classes, variants, strict=True)}
            )
        share_weight_conversions({stock_config.model_type: config_class.model_type, **class_names})
        names = {"AutoConfig": config_class.__name__, **registered_auto_classes(config_class)}
        auto_class_names[config_class] = names


def unregister_variants(stock_config: type[PreTrainedConfig]) -> None:
    """Undo `register_variants`."""
    architecture, config_class = ARCHITECTURES[stock_config.model_type], variant_config_class(stock_config)
    with _lock:
        for mapping in auto_mappings():
            unregister_in_mapping(mapping, config_class)
        names = forget_variant_classes(architecture)
        unshare_weight_conversions([config_class.model_type, *names])
        auto_class_names.pop(config_class, None)


def variant_by_name(name: str) -> Any:
    """The variant's config, model or attention class by its name, such as `PosEncGPT2LMHeadModel`; None if unknown."""
    stock_name = name.removeprefix("PosEnc")
    for architecture in ARCHITECTURES.values() if stock_name != name else ():
        folder = config_module(architecture.model_type).split(".")[2].replace("_", "")
        if architecture.own_base is None and not stock_name.lower().replace("_", "").startswith(folder):
            continue  # do not import the modules of other families
        if stock_name == architecture.config_class.__name__:
            register_variants(architecture.config_class)
            return variant_config_class(architecture.config_class)
        heads = {head.__name__: head for _, head in architecture.own_heads}
        stock_class = heads.get(stock_name) or getattr(sys.modules.get(architecture.base.__module__), stock_name, None)
        if isinstance(stock_class, type) and issubclass(stock_class, architecture.family):
            register_variants(architecture.config_class)
            return variant_class(architecture, stock_class)
        if isinstance(stock_class, type) and stock_name.endswith("CrossAttention"):
            return cross_attention_class(stock_class)
        if isinstance(stock_class, type) and stock_name.endswith("Attention"):
            return attention_class(stock_class, architecture)
        if isinstance(stock_class, type) and stock_name.endswith("Layer"):
            return layer_class(stock_class)
    return None
