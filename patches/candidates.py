"""Find the settings and the model classes of a model type, from whatever `hf_posenc.support` was given."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import re
import sys
from typing import Any

from transformers.configuration_utils import PreTrainedConfig
from transformers.dynamic_module_utils import get_class_from_dynamic_module
from transformers.modeling_utils import PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from hf_posenc.errors import PosEncError

from .architecture import Architecture
from .compat import auto_mappings, base_model_class, checkpoint_name, mapping_of_auto_class
from .variants import PosEncModel


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A model type to be tested."""

    config: PreTrainedConfig
    """With the settings to test."""
    model_class: type[PreTrainedModel]
    heads: tuple[tuple[str, type[PreTrainedModel]], ...] = ()
    """Model classes by Auto class, of types that are not transformers' own."""


def config_class_of(model_or_type: Any) -> type[PreTrainedConfig]:
    """The config class of whatever was given."""
    if isinstance(model_or_type, str):
        if model_or_type not in CONFIG_MAPPING:
            raise PosEncError(
                f"Unknown model type {model_or_type!r}; for remote code, give its config or model instead of its name"
            )
        return CONFIG_MAPPING[model_or_type]
    if isinstance(model_or_type, PosEncModel):
        return model_or_type.architecture.config_class
    if isinstance(model_or_type, PreTrainedModel):
        return type(model_or_type.config)
    if isinstance(model_or_type, PreTrainedConfig):
        return getattr(model_or_type, "stock_class", type(model_or_type))
    config_class: Any = model_or_type
    if inspect.isclass(config_class) and issubclass(config_class, PreTrainedModel):
        config_class = config_class.config_class  # type: ignore[attr-defined]
    if inspect.isclass(config_class) and issubclass(config_class, PreTrainedConfig):
        if config_class.model_type:  # type: ignore[attr-defined]
            return getattr(config_class, "stock_class", config_class)
        raise PosEncError(f"{config_class.__name__} has no model_type")
    raise PosEncError(f"Expected a model type, a config, a model, or a class of these, got {type(model_or_type)}")


def find_candidate(model_or_type: Any, config_class: type[PreTrainedConfig], trust_remote_code: bool) -> Candidate:
    """The settings and the classes to test."""
    if isinstance(model_or_type, PreTrainedModel):
        return Candidate(model_or_type.config, type(model_or_type))
    config = model_or_type if isinstance(model_or_type, PreTrainedConfig) else _default_config(config_class)
    if inspect.isclass(model_or_type) and issubclass(model_or_type, PreTrainedModel):
        return Candidate(config, model_or_type)
    for mapping in auto_mappings(config_class):
        model_class = mapping[config_class]
        with contextlib.suppress(KeyError):
            model_class = base_model_class(config_class)
        return Candidate(config, model_class[0] if isinstance(model_class, tuple) else model_class)
    heads = _remote_heads(config, trust_remote_code)
    return Candidate(config, dict(heads).get("AutoModel", heads[0][1]), heads)


def _default_config(config_class: type[PreTrainedConfig]) -> PreTrainedConfig:
    try:
        return config_class()
    except Exception as error:
        raise PosEncError(
            f"{config_class.__name__} cannot be built without arguments ({error}); give a config"
        ) from error


def _remote_heads(config: PreTrainedConfig, trust_remote_code: bool) -> tuple[tuple[str, type[PreTrainedModel]], ...]:
    """The model classes that the `auto_map` of a config names."""
    names = {
        auto_class: name
        for auto_class, name in (getattr(config, "auto_map", None) or {}).items()
        if mapping_of_auto_class(auto_class) is not None
    }
    if not names:
        raise PosEncError(f"no model class is known for {type(config).__name__}; give a model or its class")
    if not trust_remote_code:
        raise PosEncError("its model class is remote code; pass trust_remote_code=True if you trust it")
    repository = checkpoint_name(config)
    return tuple((auto_class, get_class_from_dynamic_module(name, repository)) for auto_class, name in names.items())


def is_own(model_class: type) -> bool:
    """Whether a class is one of transformers' own."""
    return model_class.__module__.startswith("transformers.")


def heads_by_name(architecture: Architecture) -> tuple[tuple[str, type[PreTrainedModel]], ...]:
    """The model classes next to the base class, by the Auto class that their name suggests."""
    heads = [("AutoModel", architecture.base)]
    for name, value in vars(sys.modules[architecture.base.__module__]).items():
        if isinstance(value, type) and issubclass(value, architecture.family) and not is_own(value):
            suffix = re.search(r"For[A-Z]\w+$", name)
            if suffix and mapping_of_auto_class(f"AutoModel{suffix[0]}") is not None:
                heads.append((f"AutoModel{suffix[0]}", value))
    return tuple(heads)


def head_to_test(architecture: Architecture, candidate: Candidate) -> type[PreTrainedModel]:
    """The language model of the type, if it has one: that is what checkpoints hold."""
    heads = dict(architecture.own_heads)
    for name in ("AutoModelForCausalLM", "AutoModelForMaskedLM"):
        try:
            head = heads[name] if heads else mapping_of_auto_class(name)[type(candidate.config)]
        except KeyError:
            continue
        return head[0] if isinstance(head, tuple) else head
    return candidate.model_class
