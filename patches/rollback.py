"""Change a live model as a whole or not at all."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import nn
from transformers.configuration_utils import PreTrainedConfig

CONTAINERS = ("_modules", "_parameters", "_buffers")
"""The attributes of a module in which torch keeps its parts."""


@contextlib.contextmanager
def unchanged_on_error(model: nn.Module) -> Iterator[None]:
    """If the block fails, give all modules and configs of a model the classes and attributes back that they had.

    Tensors are not copied: the block may replace parameters, but must not write to them.

    Args:
        model: The model that the block changes.
    """
    modules = list(model.modules())
    configs = {id(config): config for module in modules for config in _configs(getattr(module, "config", None))}
    before = [(item, type(item), _attributes(item)) for item in (*modules, *configs.values())]
    try:
        yield
    except BaseException:
        for item, item_class, attributes in before:
            object.__setattr__(item, "__class__", item_class)
            for name in CONTAINERS:  # in place: users may hold them
                if name in attributes:
                    container, parts = attributes[name]
                    container.clear()
                    container.update(parts)
                    attributes[name] = container
            vars(item).clear()
            vars(item).update(attributes)
        raise


def _configs(config: object) -> Iterator[PreTrainedConfig]:
    """A config and those nested in it."""
    if isinstance(config, PreTrainedConfig):
        yield config
        for value in vars(config).values():
            yield from _configs(value)


def _attributes(item: Any) -> dict[str, Any]:
    """A copy of an object's attributes, and of the containers among them."""
    attributes = dict(vars(item))
    for name in CONTAINERS if isinstance(item, nn.Module) else ():
        attributes[name] = (attributes[name], dict(attributes[name]))
    return attributes
