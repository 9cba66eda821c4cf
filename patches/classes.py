"""The variant classes: for any stock model class, a subclass whose forward knows positions. Made on demand."""

from __future__ import annotations

import functools
import inspect
from contextvars import ContextVar
from typing import Any, ClassVar

from torch import nn
from transformers.modeling_utils import PreTrainedModel

from hf_posenc.attention import refuse_backend
from hf_posenc.config import VariantConfig, variant_config_class
from hf_posenc.positions import locate, note_order
from hf_posenc.scheme import Scheme

from .architecture import Architecture
from .attach import attach, ignored_keys, initialise, plan, with_scheme

MODULE = "hf_posenc.models"
scheme_for_new_models: ContextVar[Any] = ContextVar("scheme_for_new_models", default=None)


class Variant:
    """What the variant classes of all architectures and heads share. Mixed in before the stock class."""

    architecture: ClassVar[Architecture]
    stock_class: ClassVar[type[PreTrainedModel]]
    _supports_flex_attn = True
    _keys_to_ignore_on_load_missing: set[str] | None
    _keys_to_ignore_on_load_unexpected: set[str] | None

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        if not isinstance(config, VariantConfig):
            config = with_scheme(config, scheme_for_new_models.get())
        super().__init__(config, *args, **kwargs)  # type: ignore[call-arg]
        self._take_schemes_in()
        if config.scheme_is_fresh:
            base: Any = next(module for module in self.modules() if isinstance(module, BaseVariant))  # type: ignore
            missing, unexpected = ignored_keys(base, self.architecture)
            self._keys_to_ignore_on_load_missing = {*(self._keys_to_ignore_on_load_missing or ()), *missing}
            self._keys_to_ignore_on_load_unexpected = {*(self._keys_to_ignore_on_load_unexpected or ()), *unexpected}

    def _take_schemes_in(self) -> None:
        """Heads have nothing to take in: the base model inside of them has done it."""

    def _init_weights(self, module: nn.Module) -> None:
        if not initialise(module):
            super()._init_weights(module)  # type: ignore[misc]

    def _check_and_adjust_attn_implementation(self, attn_implementation: Any, *args: Any, **kwargs: Any) -> Any:
        items = self.config.position_items()  # type: ignore[attr-defined]
        refuse_backend(attn_implementation, [item.scheme for item in items])
        return super()._check_and_adjust_attn_implementation(attn_implementation, *args, **kwargs)  # type: ignore[misc]

    @classmethod
    def register_for_auto_class(cls, auto_class: Any = "AutoModel") -> None:
        """Nothing to do: variants are saved with a shim that imports this package, never with copies of its files."""


class BaseVariant(Variant):
    """The variant of a base model: holds the schemes, and finds the positions of every forward."""

    position_scheme: nn.ModuleList
    active_schemes: tuple[tuple[int, ...], ...]

    def _take_schemes_in(self) -> None:
        items = self.config.position_items()  # type: ignore[attr-defined]
        attach(self, self.architecture, plan(self.architecture, self.config, items))  # type: ignore[arg-type,attr-defined]
        self.init_weights()  # type: ignore[attr-defined]

    def place(self, inputs: dict[str, Any]) -> Any:
        """Complete the inputs of a stock forward with positions; returns how the positions run."""
        config, words = self.config, self.get_input_embeddings()  # type: ignore[attr-defined]
        dtype = words.weight.dtype if inputs.get("inputs_embeds") is None else inputs["inputs_embeds"].dtype
        schemes: list[Scheme] = list(self.position_scheme)  # type: ignore[arg-type]
        needs_distances = any(scheme.overrides("score") for scheme in schemes)
        causal = self.architecture.is_causal(config)
        located = locate(inputs, dtype, config, causal, needs_distances)
        posenc = located.positions
        posenc.schemes, posenc.active = schemes, self.active_schemes
        posenc.prepared = [scheme("prepare", posenc) for scheme in schemes]
        self.architecture.fill_inputs(self, inputs)  # type: ignore[arg-type]
        for scheme in schemes:
            if scheme.overrides("embed"):
                if inputs.get("inputs_embeds") is None:
                    inputs["inputs_embeds"] = words(inputs.pop("input_ids"))
                inputs["inputs_embeds"] = scheme("embed", inputs["inputs_embeds"], posenc)
        inputs.update(position_ids=posenc.queries_BQ, attention_mask=located.attention_mask, posenc=posenc)
        return located.order


def variant_class(architecture: Architecture, stock_class: type[PreTrainedModel]) -> type[PreTrainedModel]:
    """The variant of a stock class, made once. Also works for a user's own subclass of a stock class."""
    if stock_class not in _VARIANTS:
        is_base = issubclass(stock_class, architecture.base)
        name = f"PosEnc{stock_class.__name__}"
        body: dict[str, Any] = {
            "__module__": MODULE,
            "__qualname__": name,
            "__doc__": f"{stock_class.__name__} with a position scheme.",
            "architecture": architecture,
            "stock_class": stock_class,
            "config_class": variant_config_class(architecture.family.config_class),
        }
        if is_base:
            body["forward"] = _positioned_forward(stock_class)
        _VARIANTS[stock_class] = type(name, (BaseVariant if is_base else Variant, stock_class), body)
    return _VARIANTS[stock_class]


_VARIANTS: dict[type[PreTrainedModel], type[PreTrainedModel]] = {}


def _positioned_forward(stock_class: type[PreTrainedModel]) -> Any:
    stock_forward = stock_class.forward
    names = list(inspect.signature(stock_forward).parameters)[1:]

    @functools.wraps(stock_forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        inputs = {**dict(zip(names, args, strict=False)), **kwargs}
        if (inputs.get("input_ids") is None) == (inputs.get("inputs_embeds") is None):
            return stock_forward(self, **inputs)  # which says what is wrong with that
        order = self.place(inputs)
        outputs = stock_forward(self, **inputs)
        note_order(outputs, order)
        return outputs

    return forward


def install(architecture: Architecture) -> None:
    """Make stock classes build their variant when they are given a variant's config. Inert for stock configs."""
    family = architecture.family
    if "__new__" in family.__dict__:
        return

    def __new__(cls: type, *args: Any, **kwargs: Any) -> Any:
        config = args[0] if args else kwargs.get("config")
        wanted = isinstance(config, VariantConfig) or (
            scheme_for_new_models.get() is not None and type(config) is family.config_class
        )
        if wanted and not issubclass(cls, Variant):
            cls = variant_class(architecture, cls)
        return object.__new__(cls)

    family.__new__ = __new__  # type: ignore[assignment]
