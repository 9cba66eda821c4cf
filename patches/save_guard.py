"""Refuse to save a model whose config does not name the scheme it carries: it would come back as another model."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

from transformers.configuration_utils import PreTrainedConfig
from transformers.modeling_utils import PreTrainedModel

from hf_posenc.config import VariantConfig

from .variants import PosEncBaseModel


def check_saved_config(model: PreTrainedModel) -> None:
    """Raise ValueError if what `save_pretrained` would write of the model is not what the model is."""
    carrying = [module for module in model.modules() if isinstance(module, PosEncBaseModel)]
    if isinstance(model.config, VariantConfig) and not carrying:
        raise ValueError(
            f"config.position_scheme is {model.config.position_scheme!r}, but the model was built without it and does "
            "not carry it: change a live model with hf_posenc.retrofit, or build a new one from the config"
        )
    written = list(_configs(model.config))
    for module in carrying:
        scheme = module.built_scheme
        if not any(isinstance(config, VariantConfig) and config.position_scheme == scheme for config in written):
            raise ValueError(
                f"{type(module).__name__} inside of {type(model).__name__} carries the position scheme {scheme!r}, but "
                "the config that would be saved does not name it, and the model would load without it: retrofit the "
                "whole model rather than a part, or build it from configs with a position_scheme"
            )


def _configs(config: Any) -> Iterator[PreTrainedConfig]:
    """A config and those nested in it."""
    if isinstance(config, PreTrainedConfig):
        yield config
        for value in vars(config).values():
            yield from _configs(value)


def install() -> None:
    """Have every `save_pretrained` look first. Inert for models without a scheme; does nothing the second time."""
    stock = PreTrainedModel.save_pretrained
    if hasattr(stock, "guarded_by_posenc"):
        return

    @functools.wraps(stock)
    def save_pretrained(self: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
        check_saved_config(self)
        return stock(self, *args, **kwargs)

    save_pretrained.guarded_by_posenc = True  # type: ignore[attr-defined]
    PreTrainedModel.save_pretrained = save_pretrained
