"""The configs of live models: `retrofit` replaces them by copies that name a scheme, and `restore` puts them back."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

from torch import nn
from transformers.configuration_utils import PreTrainedConfig

from hf_posenc.config import VariantConfig
from hf_posenc.spec import PositionScheme

from .attach import with_scheme


@dataclasses.dataclass
class ReplacedConfig:
    """A stock config, and the variant's config that a live model has in its place."""

    stock: PreTrainedConfig
    variant: PreTrainedConfig
    remembered: dict[str, Any] = dataclasses.field(default_factory=dict)
    """The values of the variant's config when `retrofit` was done."""

    def remember(self) -> None:
        self.remembered = copy.deepcopy(vars(self.variant))

    def changed_back(self) -> PreTrainedConfig:
        """The original object, with what was changed in the variant's since, such as the size of the vocabulary."""
        self.variant.become_stock()
        now = vars(self.variant)
        for name, value in now.items():
            if name != "model_type" and (name not in self.remembered or self.remembered[name] != value):
                vars(self.stock)[name] = value
        for name in self.remembered.keys() - now.keys():
            vars(self.stock).pop(name, None)
        return self.stock


def replace_configs(model: nn.Module, config_class: type, position_scheme: PositionScheme) -> list[ReplacedConfig]:
    """Give the model copies of its configs that name the scheme: other models may share the originals.

    A composite model nests the configs of its parts in its own; they are replaced there as well.
    """
    copies = {
        id(config): ReplacedConfig(config, with_scheme(config, position_scheme))
        for config in _configs_of(model, config_class)
    }
    _set_configs(model, lambda config: copies[id(config)].variant if id(config) in copies else None)
    return list(copies.values())


def restore_configs(model: nn.Module, replaced: list[ReplacedConfig]) -> None:
    """Undo `replace_configs`. Configs that the model got from elsewhere since become stock configs in place."""
    originals = {id(entry.variant): entry.changed_back() for entry in replaced}
    _set_configs(model, lambda config: originals.get(id(config)))
    for config in _configs_of(model, VariantConfig):
        config.become_stock()


def _configs_of(model: nn.Module, config_class: type) -> list[PreTrainedConfig]:
    """The configs of a class that modules of the model hold, each once."""
    configs = [getattr(module, "config", None) for module in model.modules()]
    return list({id(config): config for config in configs if isinstance(config, config_class)}.values())


def _set_configs(model: nn.Module, replacement: Callable[[PreTrainedConfig], PreTrainedConfig]) -> None:
    """Replace the configs of modules, and those nested in them, where there is a replacement."""
    for module in model.modules():
        config = getattr(module, "config", None)
        new = replacement(config)
        if new is not None:
            module.config = new
        elif isinstance(config, PreTrainedConfig):
            for name, nested in list(vars(config).items()):
                if isinstance(nested, PreTrainedConfig) and replacement(nested) is not None:
                    setattr(config, name, replacement(nested))
