"""Pickles of modules with a generated class: they name the stock class, which may be a user's own."""

from __future__ import annotations

from typing import Any, ClassVar

from hf_posenc.config import unknown_variant
from hf_posenc.errors import PosEncError


class PickledByStockClass:
    """Mixed into generated classes: that of a user's own subclass cannot be found by its name alone."""

    kind: ClassVar[str]
    """Which class is generated: "model", "attention", "cross_attention" or "layer"."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        reduced: Any = super().__reduce_ex__(protocol)
        generated: Any = type(self)
        if protocol < 2 or "stock_class" not in vars(generated):  # the latter in a user's subclass of a generated class
            return reduced
        architecture = getattr(generated, "architecture", None)
        model_type = None if architecture is None else architecture.model_type
        return (new_module, (generated.kind, generated.stock_class, model_type), *reduced[2:])


def new_module(kind: str, stock_class: type, model_type: str | None) -> Any:
    """An empty module of a generated class, for pickle to fill.

    Args:
        kind: Which class to generate, see `PickledByStockClass`.
        stock_class: The class that it is derived from.
        model_type: The model type of its architecture, if it depends on that.

    Returns:
        The module.

    Raises:
        PosEncError: If the model type is not supported in this process.
    """
    from .attention_modules import attention_class, cross_attention_class, layer_class
    from .auto_classes import register_variants
    from .families import ARCHITECTURES
    from .variants import variant_class

    if model_type is None:
        generated: Any = (cross_attention_class if kind == "cross_attention" else layer_class)(stock_class)
        return generated.__new__(generated)
    if model_type not in ARCHITECTURES:
        raise PosEncError(unknown_variant(f"PosEnc{stock_class.__name__}"))
    architecture = ARCHITECTURES[model_type]
    register_variants(architecture.config_class)
    if kind == "attention":
        generated = attention_class(stock_class, architecture)
    else:
        generated = variant_class(architecture, stock_class)
    return generated.__new__(generated)
