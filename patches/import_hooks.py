"""Ties the package to transformers without importing more of it than the user does.

`import hf_posenc` must be cheap, and transformers imports its modules only when they are used. So a module of
transformers is patched right after it is imported, or immediately if it already was.
"""

from __future__ import annotations

import dataclasses
import importlib.abc
import importlib.machinery
import re
import sys
import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from hf_posenc.model_types import MODEL_TYPES, VARIANT_PREFIX, config_module

from .from_pretrained import patch_from_pretrained
from .unsupported import install_refusals

SUPPORTED_RELEASES = ">=5.4,<6"
OLDEST, TOO_NEW = (5, 4), (6, 0)
warn_only = False
"""Set if nobody imported the package but `hf-posenc enable`, so that it must not make a program fail."""
TOKENIZERS_MODULE, PEFT_MODULE = "transformers.models.auto.tokenization_auto", "peft.utils.constants"
ImportHook = Callable[[types.ModuleType], None]


class _HookLoader(importlib.abc.Loader):
    """Loads as the real loader does, then runs the module's hook."""

    def __init__(self, loader: importlib.abc.Loader) -> None:
        self._loader = loader

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: types.ModuleType) -> None:
        spec = module.__spec__
        assert spec is not None
        spec.loader = module.__loader__ = self._loader  # leave no trace for code that inspects the module
        self._loader.exec_module(module)
        hook = _finder.hooks.pop(module.__name__, None)  # only now: a failed import can be retried
        if hook is not None:
            hook(module)


class _HookFinder(importlib.abc.MetaPathFinder):
    """Lets the other finders find the modules with hooks, and wraps their loader."""

    def __init__(self) -> None:
        self.hooks: dict[str, ImportHook] = {}

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in self.hooks:
            return None
        for finder in sys.meta_path:
            spec = finder.find_spec(name, path, target) if finder is not self and hasattr(finder, "find_spec") else None
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _HookLoader(spec.loader)
                return spec
        return None


_finder = _HookFinder()


def after_import(name: str, hook: ImportHook) -> None:
    """Call `hook` with a module once it is imported, or immediately if it already is."""
    if name in sys.modules:
        hook(sys.modules[name])
    else:
        _finder.hooks[name] = hook


def install() -> None:
    """Install the hooks: all that `import hf_posenc` does. Idempotent."""
    if _finder in sys.meta_path:
        return
    sys.meta_path.insert(0, _finder)
    after_import("transformers", _patch_transformers)
    if _finder not in sys.meta_path:
        return  # another release
    after_import("transformers.configuration_utils", install_refusals)
    after_import("transformers.modeling_utils", patch_from_pretrained)
    for model_type in MODEL_TYPES:
        after_import(config_module(model_type), _patch_configs)
    after_import("transformers.models.auto.configuration_auto", _patch_auto_config)
    after_import(TOKENIZERS_MODULE, _patch_tokenizers)
    after_import(PEFT_MODULE, _patch_peft)


def _patch_transformers(module: types.ModuleType) -> None:
    """Check the release, and let the variants' classes be found on the module, where tools look them up by name."""
    if not _check_release(module.__version__):
        return
    lazy_module: Any = type(sys.modules["transformers"])  # the class: transformers may replace the module again
    stock = lazy_module.__getattr__
    if hasattr(stock, "finds_variants"):
        return

    def __getattr__(self: types.ModuleType, name: str) -> Any:
        if name.startswith("PosEnc") and self.__name__ == "transformers":
            from .auto_classes import variant_by_name

            variant = variant_by_name(name)
            if variant is not None:
                return variant
        return stock(self, name)

    __getattr__.finds_variants = True  # type: ignore[attr-defined]
    lazy_module.__getattr__ = __getattr__


def _check_release(version: str) -> bool:
    """Refuse releases of transformers that the package was not written for, before anything fails in them."""
    numbers = tuple(int(number) for number in re.findall(r"\d+", version)[:2])
    if OLDEST <= numbers < TOO_NEW:
        return True
    _finder.hooks.clear()
    sys.meta_path.remove(_finder)
    message = (
        f"hf_posenc supports transformers {SUPPORTED_RELEASES}, but transformers {version} is installed: run "
        f"`pip install 'transformers{SUPPORTED_RELEASES}'`"
    )
    if not warn_only:
        raise ImportError(message)
    warnings.warn(f"{message}, or `hf-posenc disable`", stacklevel=2)
    return False


def _patch_configs(module: types.ModuleType) -> None:
    from hf_posenc.config import install_field, scheme_set_hooks, stock_config_class

    from .legacy import LEGACY_MODEL_TYPES, install_legacy_field

    for model_type in MODEL_TYPES:
        if config_module(model_type) == module.__name__:
            stock_class = stock_config_class(model_type)
            install_field(stock_class)
            if model_type in LEGACY_MODEL_TYPES:
                install_legacy_field(stock_class)
    if _register_variants not in scheme_set_hooks:
        scheme_set_hooks.append(_register_variants)


def _register_variants(stock_config: type) -> None:
    from .auto_classes import register_variants

    register_variants(stock_config)


@dataclasses.dataclass(frozen=True)
class _Unresolved:
    stock_type: str


class _VariantConfigs(dict[str, Any]):
    """The registered configs of AutoConfig, with those of the variants resolved when they are looked up.

    They cannot be registered outright: this runs in the middle of transformers' imports, where config classes and the
    modules of the Auto classes wait for each other.
    """

    def _resolve(self, key: str) -> Any:
        value = super().__getitem__(key)
        if isinstance(value, _Unresolved):
            from hf_posenc.config import stock_config_class, variant_config_class

            value = self[key] = variant_config_class(stock_config_class(value.stock_type))
        return value

    __getitem__ = _resolve

    def __iter__(self) -> Iterator[str]:
        """Defined so that `dict(...)`, which pickles AutoConfig's mapping, goes through `__getitem__`."""
        return super().__iter__()

    def values(self) -> Any:
        return [self._resolve(key) for key in self]

    def items(self) -> Any:
        return [(key, self._resolve(key)) for key in self]


def _patch_auto_config(module: types.ModuleType) -> None:
    """Make the variants' model types known to AutoConfig."""
    from .compat import extra_configs, set_extra_configs

    configs = _VariantConfigs(extra_configs(module))
    for stock_type in MODEL_TYPES:
        if stock_type in module.CONFIG_MAPPING_NAMES:  # not every release has every type
            configs.setdefault(VARIANT_PREFIX + stock_type, _Unresolved(stock_type))
    set_extra_configs(module, configs)


def _patch_tokenizers(module: types.ModuleType) -> None:
    """A variant has the tokenizer of its stock architecture."""
    _share_entries(module.TOKENIZER_MAPPING_NAMES)
    misnamed = _misnamed_tokenizers(module)
    misnamed.update(VARIANT_PREFIX + stock_type for stock_type in MODEL_TYPES if stock_type in misnamed)


def _misnamed_tokenizers(module: types.ModuleType) -> set[str]:
    """Model types whose checkpoints name a wrong tokenizer class, which transformers ignores; empty in old releases."""
    return getattr(module, "MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS", set())


def _patch_peft(module: types.ModuleType) -> None:
    """PEFT chooses default target modules by model_type: a variant has those of its stock architecture."""
    for table in _peft_tables(module):
        _share_entries(table)


def _peft_tables(module: types.ModuleType) -> list[dict[str, Any]]:
    return [table for table in vars(module).values() if isinstance(table, dict)]


def _share_entries(table: dict[str, Any]) -> None:
    """Give the variants the entries of their stock model types."""
    for stock_type in MODEL_TYPES:
        if stock_type in table:
            table.setdefault(VARIANT_PREFIX + stock_type, table[stock_type])


def register_model_type() -> None:
    """Follow up on a model type that was added to `MODEL_TYPES` after `install`."""
    from hf_posenc.config import scheme_set_hooks

    if _register_variants not in scheme_set_hooks:
        scheme_set_hooks.append(_register_variants)
    for name, patch in ((TOKENIZERS_MODULE, _patch_tokenizers), (PEFT_MODULE, _patch_peft)):
        if name in sys.modules:  # otherwise the import hook will do it
            patch(sys.modules[name])


def forget_model_type(model_type: str) -> None:
    """Undo `register_model_type` for a model type."""
    variant_type = VARIANT_PREFIX + model_type
    tokenizers, peft = (sys.modules.get(name) for name in (TOKENIZERS_MODULE, PEFT_MODULE))
    if tokenizers is not None:
        tokenizers.TOKENIZER_MAPPING_NAMES.pop(variant_type, None)
        _misnamed_tokenizers(tokenizers).discard(variant_type)
    for table in [] if peft is None else _peft_tables(peft):
        table.pop(variant_type, None)
