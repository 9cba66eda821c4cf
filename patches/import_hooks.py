"""Ties the package to transformers without importing more of it than the user does.

`import hf_posenc` must be quick, and transformers imports its parts only when they are used. So what has to be done
to a module of transformers is done right after that module is imported, or at once if it has been already.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from hf_posenc.model_types import STOCK_CONFIGS, STOCK_TYPES, VARIANT_PREFIX

AfterImport = Callable[[types.ModuleType], None]


class _Loader(importlib.abc.Loader):
    """Loads as the real loader does, then lets us act on the module."""

    def __init__(self, real: importlib.abc.Loader, after: AfterImport) -> None:
        self._real = real
        self._after = after

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType | None:
        return self._real.create_module(spec)

    def exec_module(self, module: types.ModuleType) -> None:
        spec = module.__spec__
        assert spec is not None
        spec.loader = module.__loader__ = self._real  # whoever inspects the module later sees nothing of this
        self._real.exec_module(module)
        _finder.waiting.pop(module.__name__, None)  # not before: an import can fail and be tried again
        self._after(module)


class _Finder(importlib.abc.MetaPathFinder):
    """Lets the other finders find the modules we wait for, and wraps their loader."""

    def __init__(self) -> None:
        self.waiting: dict[str, AfterImport] = {}

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        after = self.waiting.get(name)
        if after is None:
            return None
        others = (finder for finder in sys.meta_path if finder is not self and hasattr(finder, "find_spec"))
        spec = next((found for finder in others if (found := finder.find_spec(name, path, target))), None)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, after)
        return spec


_finder = _Finder()


def after_import(name: str, act: AfterImport) -> None:
    """Call `act` with the module once it is imported: at once if it is there."""
    if name in sys.modules:
        act(sys.modules[name])
    else:
        _finder.waiting[name] = act


def install() -> None:
    """What `import hf_posenc` does. Does nothing the second time."""
    if _finder in sys.meta_path:
        return
    sys.meta_path.insert(0, _finder)
    for module_name in STOCK_CONFIGS:
        after_import(module_name, _install_config)
    after_import("transformers.models.auto.configuration_auto", _install_auto_config)
    after_import("transformers.models.auto.tokenization_auto", _install_tokenizers)
    after_import("peft.utils.constants", _install_peft)


def _install_config(module: types.ModuleType) -> None:
    from hf_posenc import config as configs

    from . import legacy

    stock_class = getattr(module, STOCK_CONFIGS[module.__name__])
    configs.install(stock_class)
    if stock_class.model_type == "bert":
        legacy.install(stock_class)
    if _register_models not in configs.on_scheme_set:
        configs.on_scheme_set.append(_register_models)


def _register_models(stock_config: type) -> None:
    from hf_posenc import models

    models.register(stock_config)


class _VariantConfigs(dict[str, Any]):
    """The registered configs of AutoConfig, with those of the variants resolved when they are looked up.

    They cannot be registered outright: this runs in the middle of transformers' imports, where config classes and
    the modules of the Auto classes wait for each other.
    """

    def _resolved(self, key: str) -> Any:
        if isinstance(super().__getitem__(key), _Unresolved):
            stock_type = super().__getitem__(key).stock_type
            module_name = next(name for name in STOCK_CONFIGS if f".{stock_type}." in name)
            stock = getattr(importlib.import_module(module_name), STOCK_CONFIGS[module_name])
            from hf_posenc.config import variant_config_class

            self[key] = variant_config_class(stock)
        return super().__getitem__(key)

    __getitem__ = _resolved

    def __iter__(self) -> Iterator[str]:
        """Of its own, so that `dict(...)`, with which AutoConfig's mapping is pickled, asks `__getitem__`."""
        return super().__iter__()

    def values(self) -> Any:
        return [self._resolved(key) for key in self]

    def items(self) -> Any:
        return [(key, self._resolved(key)) for key in self]


@dataclasses.dataclass(frozen=True)
class _Unresolved:
    stock_type: str


def _install_auto_config(module: types.ModuleType) -> None:
    """Make the variants' model types known to AutoConfig."""
    configs = _VariantConfigs(module.CONFIG_MAPPING._extra_content)
    for stock_type in STOCK_TYPES:
        configs.setdefault(VARIANT_PREFIX + stock_type, _Unresolved(stock_type))
    module.CONFIG_MAPPING._extra_content = configs


def _install_tokenizers(module: types.ModuleType) -> None:
    """A variant has the tokenizer of its stock architecture."""
    names = module.TOKENIZER_MAPPING_NAMES
    for stock_type in STOCK_TYPES:
        if stock_type in names:
            names[VARIANT_PREFIX + stock_type] = names[stock_type]


def _install_peft(module: types.ModuleType) -> None:
    """PEFT's default target modules go by model_type: a variant has those of its stock architecture."""
    for table in vars(module).values():
        if isinstance(table, dict):
            for stock_type in STOCK_TYPES:
                if stock_type in table:
                    table.setdefault(VARIANT_PREFIX + stock_type, table[stock_type])
