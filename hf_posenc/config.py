"""The `position_scheme` field of config classes, and the config classes of the variants.

Each supported stock config class gets one descriptor. On a stock config it reads as None; setting it turns that
instance into the variant's config class, which has its own `model_type`. A variant can therefore never be mistaken for
a stock model.
"""

from __future__ import annotations

import enum
import importlib
import json
import os
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

from transformers.configuration_utils import PreTrainedConfig
from transformers.utils import CONFIG_NAME

from .errors import PosEncError, install_command
from .model_types import MODEL_TYPES, VARIANT_PREFIX, config_module
from .spec import PositionScheme, SchemeSpec, parse_position_scheme
from .validation import check_model_sizes, truncate_repr

REMOTE_CODE_MODULE = "modeling_hf_posenc"
SENTINEL_START = "this is a variant made by hf_posenc, not a stock checkpoint: "
SENTINEL = SENTINEL_START + f"run `{install_command()}`, and `import hf_posenc` before you load it"
REMOTE_CODE = """\
# This model needs hf_posenc: run `{install}`,
# and `import hf_posenc` before you load it, or load it with trust_remote_code=True, which runs this file.
# In a try block, because transformers checks other imports itself and suggests another install command.
try:
    import hf_posenc
    from hf_posenc.models import {names}
except ModuleNotFoundError as error:
    if error.name != "hf_posenc":
        raise
    raise ImportError(
        "This model needs hf_posenc: run `{install}`, and `import hf_posenc` before you load it"
    ) from None
"""
SENTINEL_FIELDS = ("initializer_range", "hidden_act", "activation_function")
"""Fields of config.json that hold the sentinel instead of their value, so that stock classes refuse to load a variant:
transformers 5 checks the type of the first, every release looks the activation up, and both print what they got."""
SENTINEL_VALUES_KEY = "posenc_sentinel_values"
"""The field of config.json that holds the real values of the sentinel fields."""
BASE_MODEL_KEY = "posenc_base_model"
"""The field of config.json that holds the Hub id of the stock checkpoint."""
STOCK_LENGTH_KEY = "posenc_stock_max_position_embeddings"
"""The field of config.json that holds `max_position_embeddings` of the stock checkpoint if the variant has another."""
HUB_ID = re.compile(r"(?!\.)[\w.-]{1,96}(/(?!\.)[\w.-]{1,96})?", re.ASCII)

scheme_set_hooks: list[Callable[[type[PreTrainedConfig]], None]] = []
"""Called with the stock config class whenever a scheme is set on one of its instances. Must be idempotent."""
auto_class_names: dict[type, dict[str, str]] = {}
"""For each variant config class, the variant model class behind each Auto class: the `auto_map` of config.json."""
_variant_config_classes: dict[type[PreTrainedConfig], type[PreTrainedConfig]] = {}
_lock = threading.RLock()


class SchemeOrigin(enum.Enum):
    """Where the scheme of a variant's config comes from, which decides what its checkpoint contains."""

    NEW = "set on a stock config: no checkpoint has its parameters yet"
    CHECKPOINT = "read from the config.json of a saved variant"
    LEGACY = "read from position_embedding_type of transformers 4, under other parameter names"


class PositionSchemeField:
    """The `position_scheme` attribute of a config class, stock or variant."""

    def __get__(self, config: PreTrainedConfig | None, owner: type | None = None) -> Any:
        return self if config is None else vars(config).get("position_scheme")

    def __set__(self, config: PreTrainedConfig, value: object) -> None:
        if value is None:
            _become_stock(config)
        else:
            _become_variant(config, value)


class VariantConfig:
    """Shared by the config classes of all variants. Mixed in before the stock config class."""

    stock_class: ClassVar[type[PreTrainedConfig]]
    model_type: ClassVar[str]
    position_scheme: PositionScheme
    scheme_origin: SchemeOrigin

    @property
    def position_specs(self) -> tuple[SchemeSpec, ...]:
        """The parsed schemes.

        Raises:
            PosEncError: If the config has no `position_scheme`.
        """
        specs: tuple[SchemeSpec, ...] | None = vars(self).get("_position_specs")
        if specs is None:  # transformers builds configs without arguments to learn the defaults
            raise PosEncError(
                f"A {self.model_type} config needs a position_scheme; use {self.stock_class.__name__} for a stock model"
            )
        return specs

    @property
    def base_model(self) -> str | None:
        """The Hub id of the stock checkpoint that the variant was made from, if it came from the Hub."""
        return vars(self).get(BASE_MODEL_KEY)

    def record_base_model(self, name: str | os.PathLike[str]) -> None:
        """Remember the stock checkpoint if it is on the Hub. Local paths are not recorded: they may be private."""
        if is_hub_id(name):
            setattr(self, BASE_MODEL_KEY, str(name))

    def become_stock(self) -> None:
        """Turn back into the stock config, dropping everything about the scheme."""
        for name in ("position_scheme", "_position_specs", "scheme_origin", BASE_MODEL_KEY):
            vars(self).pop(name, None)
        _restore_stock_length(self)
        _change_class(self, self.stock_class)

    def to_dict(self) -> dict[str, Any]:
        values: dict[str, Any] = super().to_dict()  # type: ignore[misc]
        for name in ("_position_specs", "scheme_origin"):
            values.pop(name, None)
        return values

    def to_json_file(self, json_file_path: str | os.PathLike[str], use_diff: bool = True) -> None:
        """Write config.json with the sentinel that stock classes refuse, and the remote-code module next to it."""
        values = json.loads(self.to_json_string(use_diff))  # type: ignore[attr-defined]
        add_sentinel(values)
        _run_scheme_set_hooks(self.stock_class)  # an unpickled config has not been through the constructor
        names = auto_class_names[type(self)]
        values["auto_map"] = {auto: f"{REMOTE_CODE_MODULE}.{name}" for auto, name in names.items()}
        path = Path(json_file_path)
        path.write_text(json.dumps(values, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        if path.name == CONFIG_NAME:
            write_remote_code_module(type(self), path.parent)

    def save_pretrained(self, save_directory: str | os.PathLike[str], *args: Any, **kwargs: Any) -> None:
        super().save_pretrained(save_directory, *args, **kwargs)  # type: ignore[misc]
        if self.scheme_origin is SchemeOrigin.NEW:
            self.scheme_origin = SchemeOrigin.CHECKPOINT

    @classmethod
    def register_for_auto_class(cls, auto_class: Any = "AutoConfig") -> None:
        """Do nothing: variants are saved with a module that imports this package, never with copies of its files."""


def add_sentinel(values: dict[str, Any]) -> None:
    """Put the sentinel into the values of a config.json, and the values that it replaces next to it."""
    values[SENTINEL_VALUES_KEY] = {field: values[field] for field in SENTINEL_FIELDS if field in values}
    values.update(dict.fromkeys([SENTINEL_FIELDS[0], *values[SENTINEL_VALUES_KEY]], SENTINEL))


def is_sentinel(value: object) -> bool:
    """Whether a value of a config.json is the sentinel, also that of a release with another install command."""
    return isinstance(value, str) and value.startswith(SENTINEL_START)


def is_hub_id(name: str | os.PathLike[str]) -> bool:
    """Whether a checkpoint name is a Hub id rather than a local path."""
    return str(name) != "None" and bool(HUB_ID.fullmatch(str(name))) and not Path(name).exists()


def write_remote_code_module(config_class: type, directory: Path) -> None:
    """Write the file that `trust_remote_code=True` runs. It imports hf_posenc, or says how to install it."""
    names = ", ".join(sorted(set(auto_class_names[config_class].values())))
    text = REMOTE_CODE.format(names=names, install=install_command())
    (directory / f"{REMOTE_CODE_MODULE}.py").write_text(text, encoding="utf-8")


def stock_config_class(model_type: str) -> type[PreTrainedConfig]:
    """The config class of transformers for a model type."""
    module = importlib.import_module(config_module(model_type))
    classes = [value for value in vars(module).values() if isinstance(value, type)]
    return next(cls for cls in classes if vars(cls).get("model_type") == model_type)


def variant_config_class(stock_class: type[PreTrainedConfig]) -> type[PreTrainedConfig]:
    """The config class of the variants of a stock config class, created on first use."""
    with _lock:
        if stock_class not in _variant_config_classes:
            _variant_config_classes[stock_class] = _make_variant_config_class(stock_class)
        return _variant_config_classes[stock_class]


def _make_variant_config_class(stock_class: type[PreTrainedConfig]) -> type[PreTrainedConfig]:
    name, model_type = f"PosEnc{stock_class.__name__}", VARIANT_PREFIX + stock_class.model_type

    def __init__(self: Any, **kwargs: Any) -> None:
        sentinel_values = kwargs.pop(SENTINEL_VALUES_KEY, None)
        if isinstance(sentinel_values, dict):  # read back from config.json
            # Fields with their default value are left out of the file, but marked all the same.
            kwargs = {name: value for name, value in kwargs.items() if not is_sentinel(value)}
            kwargs.update({field: sentinel_values[field] for field in SENTINEL_FIELDS if field in sentinel_values})
        kwargs.pop("auto_map", None)
        from_checkpoint = kwargs.pop("model_type", None) == model_type
        self.scheme_origin = SchemeOrigin.CHECKPOINT if from_checkpoint else SchemeOrigin.NEW
        check_model_sizes(kwargs)
        stock_class.__init__(self, **kwargs)
        _run_scheme_set_hooks(stock_class)

    def __eq__(self: Any, other: object) -> bool:
        return type(self) is type(other) and self.to_dict() == other.to_dict()  # type: ignore[attr-defined]

    body = {  # defined in the class body, where the dataclass machinery of configs does not replace them
        "__init__": __init__,
        "__eq__": __eq__,
        "__module__": __name__,
        "__qualname__": name,
        "__doc__": f"{stock_class.__name__} with a `position_scheme`.",
        "__annotations__": {},
        "_auto_class": None,  # remote code sets it on stock classes, whose source files must not be saved
        "model_type": model_type,
        "stock_class": stock_class,
    }
    globals()[name] = variant = type(name, (VariantConfig, stock_class), body)  # pickle looks the class up here
    return variant


def __getattr__(name: str) -> Any:
    """Create a variant config class when it is asked for by name, as unpickling does."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    for model_type in MODEL_TYPES:
        if name == f"PosEnc{CONFIG_MAPPING_NAMES.get(model_type)}":
            return install_field(stock_config_class(model_type))
    if name.startswith("PosEnc"):
        raise PosEncError(unknown_variant(name))
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def unknown_variant(name: str) -> str:
    """What to do about an unknown variant class that a pickle or a saved variant asks for."""
    return (
        f"{name} is a variant of a model type that this process does not know. If it was enabled by hf_posenc.support, "
        "call hf_posenc.support with the stock model or its config before you load the variant"
    )


def install_field(stock_class: type[PreTrainedConfig]) -> type[PreTrainedConfig]:
    """Give a stock config class the `position_scheme` field. Idempotent.

    Returns:
        The config class of its variants.
    """
    variant = variant_config_class(stock_class)
    if "position_scheme" not in vars(stock_class):
        stock_class.position_scheme = PositionSchemeField()

        def __new__(cls: type, *args: Any, **kwargs: Any) -> Any:
            # `GPT2Config.from_pretrained(variant)` reads the variant's config.json: build the variant's config.
            if cls is stock_class and kwargs.get("model_type") == variant.model_type:
                cls = variant
            return super(stock_class, cls).__new__(cls)

        stock_class.__new__ = staticmethod(__new__)  # type: ignore[assignment]
    return variant


def uninstall_field(stock_class: type[PreTrainedConfig]) -> None:
    """Undo `install_field`, for a config class whose models turned out not to be supported."""
    with _lock:
        variant = _variant_config_classes.pop(stock_class, None)
        if variant is not None:
            del stock_class.position_scheme
            # Deleting it would leave CPython's slot behind, which then refuses the arguments of the constructor.
            stock_new: Any = lambda cls, *args, **kwargs: super(stock_class, cls).__new__(cls)  # noqa: E731
            stock_class.__new__ = staticmethod(stock_new)
            globals().pop(variant.__name__, None)
            globals().update({cls.__name__: cls for cls in _variant_config_classes.values()})  # of the same name


def _run_scheme_set_hooks(stock_class: type[PreTrainedConfig]) -> None:
    for hook in scheme_set_hooks:
        hook(stock_class)


def _become_variant(config: PreTrainedConfig, value: object) -> None:
    specs = parse_position_scheme(value)
    try:
        value = json.loads(json.dumps(value, allow_nan=False))  # a private copy, and proof that it can be saved
    except (TypeError, ValueError) as error:
        raise PosEncError(f"position_scheme must be plain JSON, got {truncate_repr(value)}: {error}") from None
    stock_class = next(cls for cls in type(config).__mro__ if cls in _variant_config_classes)
    if not isinstance(config, VariantConfig):
        if type(config) is not stock_class:
            raise PosEncError(
                f"{type(config).__name__} is a subclass of {stock_class.__name__}, and a position_scheme would lose "
                f"what it adds; set it on a {stock_class.__name__}"
            )
        _run_scheme_set_hooks(stock_class)
        _change_class(config, _variant_config_classes[stock_class])
        config.scheme_origin = SchemeOrigin.NEW
    elif config.scheme_origin is SchemeOrigin.LEGACY and specs != config.position_specs:
        config.scheme_origin = SchemeOrigin.NEW  # not what the checkpoint's old field says: nothing of it is stored
    if vars(config).get("_position_specs", specs) != specs:
        _restore_stock_length(config)  # how far the earlier scheme reads
    vars(config).update(position_scheme=value, _position_specs=specs)


def _restore_stock_length(config: PreTrainedConfig) -> None:
    if STOCK_LENGTH_KEY in vars(config):
        config.max_position_embeddings = vars(config).pop(STOCK_LENGTH_KEY)


def _become_stock(config: PreTrainedConfig) -> None:
    if not isinstance(config, VariantConfig):
        return
    if config.scheme_origin is not SchemeOrigin.NEW:
        raise PosEncError(
            "position_scheme=None on the config of a saved variant would load it as a stock model, which it is not. "
            'Use "none" for no position signal, or load the checkpoint that the variant was made from'
        )
    config.become_stock()


def _change_class(config: PreTrainedConfig, new_class: type[PreTrainedConfig]) -> None:
    config.__class__ = new_class
    if "model_type" in vars(config):  # configs read from a file carry it on the instance, where it takes precedence
        config.model_type = new_class.model_type
