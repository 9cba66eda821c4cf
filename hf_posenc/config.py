"""Configs that carry a `position_scheme`: the field itself, and the config class of each architecture's variants.

The stock config class gets one descriptor. Reading it on a stock config gives None; setting it turns that instance
into the variant's config class, with a `model_type` of its own, so that no variant can be taken for a stock model.
"""

from __future__ import annotations

import importlib
import json
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

from transformers.configuration_utils import PreTrainedConfig
from transformers.utils import CONFIG_NAME

from .model_types import STOCK_CONFIGS, VARIANT_PREFIX
from .spec import SchemeSpec, parse_position_scheme
from .validation import check_model_sizes, truncate_repr

SHIM = "modeling_hf_posenc"
MARK = (
    "this is a variant made by hf_posenc, not a stock checkpoint: "
    "run `pip install hf_posenc`, and `import hf_posenc` before you load it"
)
MARKED_FIELDS = ("initializer_range", "hidden_act", "activation_function")
"""Fields of config.json that hold the mark in place of their value, so that stock classes refuse to load a variant:
transformers 5 checks the type of the first, any release looks the activation up, and both show what they found."""
KEPT_FIELDS = "posenc_marked_fields"
"""The field of config.json that holds the values of the marked ones."""
BASE_MODEL = "posenc_base_model"
"""The field of config.json that names the stock checkpoint on the Hub that a variant was made from."""
FRESH, LEGACY = "_position_scheme_is_fresh", "_position_scheme_is_legacy"

on_scheme_set: list[Callable[[type[PreTrainedConfig]], None]] = []
"""Called with the stock config class whenever a scheme is set; each sees to it that it acts once."""


class PositionScheme:
    """The `position_scheme` attribute of a config class, stock or variant."""

    def __get__(self, config: PreTrainedConfig | None, owner: type | None = None) -> Any:
        return self if config is None else config.__dict__.get("position_scheme")

    def __set__(self, config: PreTrainedConfig, value: Any) -> None:
        if value is None:
            _become_stock(config)
        else:
            parse_position_scheme(value)
            _become_variant(config, value)


class VariantConfig:
    """What the config classes of all variants share. Mixed in before the stock config class."""

    stock_class: ClassVar[type[PreTrainedConfig]]
    model_type: ClassVar[str]
    position_scheme: Any

    def position_specs(self) -> tuple[SchemeSpec, ...]:
        scheme = self.__dict__.get("position_scheme")
        if scheme is None:  # transformers builds configs without arguments, to see what the defaults are
            raise ValueError(
                f"a {self.model_type} config needs a position_scheme; a model without one has a "
                f"{self.stock_class.__name__}"
            )
        return parse_position_scheme(scheme)

    @property
    def scheme_is_fresh(self) -> bool:
        """Whether the scheme was set on a stock config, so that its parameters are in no checkpoint yet."""
        return bool(self.__dict__.get(FRESH))

    @property
    def scheme_is_legacy(self) -> bool:
        """Whether the scheme was read off a field of older transformers: its parameters have other names there."""
        return bool(self.__dict__.get(LEGACY))

    @property
    def base_model(self) -> str | None:
        """The Hub id of the stock checkpoint that the variant was made from, if that is where it came from."""
        return self.__dict__.get(BASE_MODEL)

    def remember_base_model(self, name: Any) -> None:
        """Keep the stock checkpoint's name if that is a Hub id. A path of this machine is nobody else's business."""
        if is_hub_id(name):
            self.__dict__[BASE_MODEL] = str(name)

    def forget_scheme(self) -> None:
        """Turn back into the stock config, whatever the scheme's parameters have become."""
        for name in ("position_scheme", FRESH, LEGACY, BASE_MODEL):
            self.__dict__.pop(name, None)
        _change_class(self, self.stock_class)

    def to_dict(self) -> dict[str, Any]:
        values = super().to_dict()  # type: ignore[misc]
        for name in (FRESH, LEGACY):
            values.pop(name, None)
        return values

    def to_json_file(self, json_file_path: Any, use_diff: bool = True) -> None:
        """Write config.json with the mark that stock classes refuse, and beside it the shim for remote code."""
        values = json.loads(self.to_json_string(use_diff))  # type: ignore[attr-defined]
        values[KEPT_FIELDS] = {field: values[field] for field in MARKED_FIELDS if field in values}
        values.update(dict.fromkeys(values[KEPT_FIELDS], MARK))
        _announce(self.stock_class)  # a config that was unpickled has not been through the constructor
        values["auto_map"] = {auto: f"{SHIM}.{name}" for auto, name in auto_class_names[type(self)].items()}
        path = Path(json_file_path)
        path.write_text(json.dumps(values, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        if path.name == CONFIG_NAME:
            write_shim(type(self), path.parent)

    def save_pretrained(self, save_directory: Any, *args: Any, **kwargs: Any) -> None:
        super().save_pretrained(save_directory, *args, **kwargs)  # type: ignore[misc]
        self.__dict__[FRESH] = False

    @classmethod
    def register_for_auto_class(cls, auto_class: Any = "AutoConfig") -> None:
        """Nothing to do: variants are saved with a shim that imports this package, never with copies of its files."""


def is_hub_id(name: Any) -> bool:
    """Whether a checkpoint that was loaded by this name came from the Hub: it reads as an id, and is no path here."""
    return name != "None" and bool(_HUB_ID.fullmatch(str(name))) and not Path(str(name)).exists()


_HUB_ID = re.compile(r"(?!\.)[\w.-]{1,96}(/(?!\.)[\w.-]{1,96})?", re.ASCII)


auto_class_names: dict[type, dict[str, str]] = {}
"""For each variant config class, the variant class that each Auto class gives: config.json's `auto_map`."""


def write_shim(config_class: type, directory: Path) -> None:
    """The file that `trust_remote_code=True` runs: it imports hf_posenc, and where there is none, names the package."""
    names = ", ".join(sorted(set(auto_class_names[config_class].values())))
    text = f"import hf_posenc  # pip install hf_posenc\nfrom hf_posenc.models import {names}\n"
    (directory / f"{SHIM}.py").write_text(text, encoding="utf-8")


def variant_config_class(stock_class: type[PreTrainedConfig]) -> type[PreTrainedConfig]:
    """The config class of the variants of a stock config class; made once."""
    with _lock:
        if stock_class not in _VARIANTS:
            _VARIANTS[stock_class] = _make_variant_config_class(stock_class)
        return _VARIANTS[stock_class]


def _make_variant_config_class(stock_class: type[PreTrainedConfig]) -> type[PreTrainedConfig]:
    name, model_type = f"PosEnc{stock_class.__name__}", VARIANT_PREFIX + stock_class.model_type

    def __init__(self: Any, **kwargs: Any) -> None:
        kept = kwargs.pop(KEPT_FIELDS, None)
        if isinstance(kept, dict):  # read back from config.json: whatever mark stands there, the values are these
            kwargs.update({field: kept[field] for field in MARKED_FIELDS if field in kept})
        kwargs.pop("auto_map", None)
        from_checkpoint = kwargs.pop("model_type", None) == model_type
        check_model_sizes(kwargs)
        stock_class.__init__(self, **kwargs)
        self.__dict__[FRESH] = not from_checkpoint
        _announce(stock_class)

    def __eq__(self: Any, other: Any) -> bool:
        return type(self) is type(other) and self.to_dict() == other.to_dict()

    # These two stand in the class body, where the dataclass machinery of configs does not replace them.
    body = {
        "__init__": __init__,
        "__eq__": __eq__,
        "__module__": __name__,
        "__qualname__": name,
        "__doc__": f"{stock_class.__name__} with a `position_scheme`.",
        "__annotations__": {},
        "model_type": model_type,
        "stock_class": stock_class,
    }
    globals()[name] = variant = type(name, (VariantConfig, stock_class), body)
    return variant


_VARIANTS: dict[type[PreTrainedConfig], type[PreTrainedConfig]] = {}
_lock = threading.RLock()


def __getattr__(name: str) -> Any:
    """The variant config classes by name, made when they are asked for: a pickled config asks for its class."""
    for module_name, stock_name in STOCK_CONFIGS.items():
        if name == f"PosEnc{stock_name}":
            return install(getattr(importlib.import_module(module_name), stock_name))
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _announce(stock_class: type[PreTrainedConfig]) -> None:
    for hook in on_scheme_set:
        hook(stock_class)


def install(stock_class: type[PreTrainedConfig]) -> type[PreTrainedConfig]:
    """Give a stock config class the `position_scheme` attribute. Does nothing the second time."""
    variant = variant_config_class(stock_class)
    if "position_scheme" not in stock_class.__dict__:
        stock_class.position_scheme = PositionScheme()

        def __new__(cls: type, *args: Any, **kwargs: Any) -> Any:
            # `GPT2Config.from_pretrained(variant)` reads the variant's config.json: build the variant's config.
            if cls is stock_class and kwargs.get("model_type") == variant.model_type:
                cls = variant
            return super(stock_class, cls).__new__(cls)

        stock_class.__new__ = staticmethod(__new__)  # type: ignore[assignment]
    return variant


def _become_variant(config: PreTrainedConfig, value: Any) -> None:
    try:
        value = json.loads(json.dumps(value, allow_nan=False))  # a copy of its own, and proof that it can be saved
    except (TypeError, ValueError) as error:
        raise ValueError(f"position_scheme must be plain JSON, got {truncate_repr(value)}: {error}") from None
    stock_class = next(cls for cls in type(config).__mro__ if cls in _VARIANTS)
    if not isinstance(config, VariantConfig) and type(config) is not stock_class:
        raise ValueError(
            f"{type(config).__name__} is a subclass of {stock_class.__name__}, and a position_scheme would lose "
            f"what it adds; set it on a {stock_class.__name__}"
        )
    _announce(stock_class)
    if not isinstance(config, VariantConfig):
        _change_class(config, _VARIANTS[stock_class])
        config.__dict__[FRESH] = True
    elif config.scheme_is_legacy and parse_position_scheme(value) != parse_position_scheme(config.position_scheme):
        # Another scheme than the checkpoint's old field says: nothing of it is in the checkpoint.
        config.__dict__.update({FRESH: True, LEGACY: False})
    config.__dict__["position_scheme"] = value


def _become_stock(config: PreTrainedConfig) -> None:
    if not isinstance(config, VariantConfig):
        return
    if not config.scheme_is_fresh:
        raise ValueError(
            "position_scheme=None on the config of a saved variant would read it as a stock model, which it is not; "
            'for no position signal say "none", for the stock model load the checkpoint it was made from'
        )
    config.forget_scheme()


def _change_class(config: PreTrainedConfig, new: type[PreTrainedConfig]) -> None:
    config.__class__ = new
    if "model_type" in config.__dict__:  # configs read from a file carry it on the instance, where it would win
        config.__dict__["model_type"] = new.model_type
