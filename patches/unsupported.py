"""Why a model type cannot have a position scheme, found from the structure of its classes. Used for error messages."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from hf_posenc.errors import PosEncError
from hf_posenc.model_types import MODEL_TYPES

if TYPE_CHECKING:
    from transformers.configuration_utils import PreTrainedConfig

FIELD = "position_scheme"
SUPPORTED_LAYER_TYPES = {"full_attention", "sliding_attention"}
WITHOUT_SCORES = re.compile("Mamba|ShortConv|DeltaNet|Recurrent|LinearAttention|Lightning|Rwkv|xLSTM|linear_att|hybrid")
"""Names of classes and layer types that mix tokens without attention scores."""
LATENT = re.compile("kv_lora_rank|kv_a_proj|MLA")
"""Names in the source of multi-head latent attention."""
CLASS = re.compile(r"^class (?P<name>\w+).*?(?=^(?:class|def|@)|\Z)", re.MULTILINE | re.DOTALL)
"""A class at the top level of a source file, up to the next class or function."""
ATTENTION = re.compile("Attention|Attn|MLA")
INTERFACE = "ALL_ATTENTION_FUNCTIONS"
"""The registry of attention functions, in the source of modules that call one of them."""


@dataclasses.dataclass(frozen=True)
class Refusal:
    """Why a model type is not supported, and what to do instead."""

    reason: str
    way_out: str
    is_structural: bool = True
    """Whether the structure of the type rules schemes out, so that no self-test could clear it."""

    def message(self, model_type: str) -> str:
        """The error message for a model type."""
        from hf_posenc.validation import truncate_repr  # imports torch, which an error can afford

        name = truncate_repr(model_type)
        return (
            f"position_scheme is not supported on model type {name}: {self.reason}. {self.way_out}; docs/families.md "
            "lists the supported model types"
        )


def refusal_of(model_type: str) -> Refusal:
    """Find out why a model type is not supported.

    Args:
        model_type: A `model_type` for which there is no `Architecture`, known to transformers or not.

    Returns:
        The reason and the nearest way out.
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    if model_type not in CONFIG_MAPPING:
        return Refusal("transformers does not have it", "For remote code, call hf_posenc.support(config) first", False)
    config_class = CONFIG_MAPPING[model_type]
    parts = getattr(config_class, "sub_configs", {})
    if "text_config" in parts:
        return _refusal_of_composite(getattr(default_config(config_class), "text_config", None))
    reason = _reason(model_type, config_class, parts)
    if reason is not None:
        return Refusal(reason, _nearest(model_type))
    return Refusal("it has no record", f"hf_posenc.support({model_type!r}) enables it if it passes a self-test", False)


def refuse(model_type: str, subject: object = None) -> PosEncError:
    """The error for a model type that is not supported.

    Args:
        model_type: The `model_type` of a config, trusted or not.
        subject: The checkpoint or model to name first.
    """
    prefix = "" if subject is None else f"{subject}: "
    return PosEncError(prefix + refusal_of(model_type).message(model_type))


def _refusal_of_composite(text_config: PreTrainedConfig) -> Refusal:
    text_type = getattr(text_config, "model_type", None)
    if text_type is None or text_type in MODEL_TYPES:
        name = "" if text_type is None else f", here of type {text_type!r}"
        reason = f"it is made of several models, and a scheme belongs to the text model{name}"
        return Refusal(reason, "Call hf_posenc.retrofit on the text model, a part of the whole")
    return Refusal(
        f"it is made of several models, and its text model, of type {text_type!r}, is not supported either",
        _nearest(text_type),
    )


def _reason(model_type: str, config_class: type, parts: dict[str, Any]) -> str | None:
    """What in the structure of a model type rules schemes out; None if nothing does."""
    if any(re.match("vision|audio", name) for name in parts):
        return "it mixes text with images or audio"
    if getattr(config_class, "is_encoder_decoder", False) or "decoder_config" in parts:
        return "it has several stacks of layers, such as an encoder and a decoder, and a scheme belongs to one stack"
    if not _is_language_model(model_type):
        return "transformers has no language model of this type"
    classes = class_sources(config_class)
    attentions = [source for name, source in classes.items() if ATTENTION.search(name) and "def forward(" in source]
    if any(LATENT.search(source) for source in attentions):
        return "its keys are compressed into a latent vector (multi-head latent attention), so they cannot be rotated"
    layer_types = set(getattr(default_config(config_class), "layer_types", None) or ()) - SUPPORTED_LAYER_TYPES
    if any(WITHOUT_SCORES.search(name) for name in (*classes, *layer_types)) or (classes and not attentions):
        return "it has layers without attention scores (state space, convolution, linear attention or Fourier)"
    if layer_types:
        return f"it has layers of type {', '.join(sorted(layer_types))}"
    if attentions and not any(INTERFACE in source for source in attentions):
        return "its attention does not call transformers' attention interface, so no scheme can reach its scores"
    return None


def _is_language_model(model_type: str) -> bool:
    from transformers.models.auto import modeling_auto

    mappings = (modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES)
    return any(model_type in mapping for mapping in mappings)


@functools.cache
def class_sources(config_class: type) -> dict[str, str]:
    """The source of each class in the modeling file next to a config class. Reads it, because importing it is slow."""
    config_file = Path(inspect.getfile(config_class))
    path = config_file.with_name(config_file.name.replace("configuration_", "modeling_"))
    if not path.is_file():  # the type uses the classes of another
        return {}
    return {match["name"]: match[0] for match in CLASS.finditer(path.read_text(encoding="utf-8"))}


def default_config(config_class: type) -> Any:
    try:
        return config_class()
    except Exception:  # some classes have no valid defaults, and raise errors of many kinds
        return None


def _nearest(model_type: str) -> str:
    """Advice that names the supported type closest in name, or one of each kind."""

    def letters(name: str) -> str:
        return re.sub("[^a-z0-9]", "", name)

    name = letters(model_type)
    near = [known for known in MODEL_TYPES if name.startswith(letters(known)) or letters(known).startswith(name)]
    examples = repr(max(near, key=len)) if near else "'qwen3' (a decoder) or 'modernbert' (an encoder)"
    return f"Use a checkpoint of another type, such as {examples}"


class RefusingField:
    """The `position_scheme` attribute of all config classes that are not supported: reads as None, refuses a value.

    Without it, transformers would drop the argument or keep it as an unused field of the config.
    """

    def __get__(self, config: PreTrainedConfig, owner: type | None = None) -> Any:
        return self if config is None else vars(config).get(FIELD)

    def __set__(self, config: PreTrainedConfig, value: object) -> None:
        is_generic = self is vars(type(config)).get(FIELD)  # Trainer reads any config.json with the base class
        if is_generic or FIELD in inspect.signature(type(config).__init__).parameters:  # or a field of the class's own
            vars(config)[FIELD] = value
        elif value is not None:
            raise refuse(config.model_type)


def install_refusals(module: ModuleType) -> None:
    """Make all configs refuse a `position_scheme`, except those that `install_field` gives a field of their own."""
    module.PreTrainedConfig.position_scheme = RefusingField()
