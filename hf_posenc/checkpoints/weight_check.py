"""Compare the tensors that a config's model needs with those in a checkpoint's headers. No weights are read."""

from __future__ import annotations

import dataclasses
import re
import sys
from collections.abc import Callable, Iterable, Mapping

import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers import initialization as init
from transformers.utils import logging

from ..config import VariantConfig
from ..errors import PosEncError
from ..patches import (
    ARCHITECTURES,
    LEGACY_PARAMETER,
    LEGACY_TABLE,
    Architecture,
    Explanation,
    build_explanation,
)
from ..patches.compat import ModelHooks
from ..validation import truncate_repr
from .shards import TensorInfo

RENAMED_PARAMETERS = (
    (LEGACY_TABLE, LEGACY_PARAMETER),
    (r"LayerNorm\.gamma$", "LayerNorm.weight"),
    (r"LayerNorm\.beta$", "LayerNorm.bias"),
)
"""Patterns of names in old checkpoints, and the names that transformers gives them on loading."""
POOLER = "pooler."
"""Heads that do not use BERT's pooler leave it out of their checkpoints."""
MAX_NAMES_SHOWN = 4


@dataclasses.dataclass(frozen=True)
class WeightReport:
    """What runs in the model, why the weights do not fit it, and what is unusual but harmless."""

    explanation: Explanation | None = None
    problems: list[str] = dataclasses.field(default_factory=list)
    warnings: list[str] = dataclasses.field(default_factory=list)


def is_scheme_parameter(name: str) -> bool:
    """Whether a parameter belongs to a position scheme rather than to the stock model."""
    return "position_scheme." in name


def check_weights(
    config: PreTrainedConfig, tensors: Mapping[str, TensorInfo], include: Callable[[str], bool] | None = None
) -> WeightReport:
    """Compare tensors with a config's model; with `include`, only those base-model tensors that it accepts."""
    stock_type = config.stock_class.model_type if isinstance(config, VariantConfig) else config.model_type
    architecture = ARCHITECTURES[stock_type]
    num_layers = count_layers(architecture, tensors)
    if config.num_hidden_layers > num_layers:
        problem = f"config.json has {config.num_hidden_layers} layers, but the weights have {num_layers}"
        return WeightReport(problems=[problem])
    model = build_meta_model(config, architecture)
    explanation = build_explanation(model)
    if getattr(config, "quantization_config", None):
        return WeightReport(explanation, warnings=["quantized weights: completeness was not checked"])
    # Names are compared as the base model has them: transformers loads checkpoints with and without a head alike.
    prefix = architecture.base.base_model_prefix + "."
    expected = {name.removeprefix(prefix): tuple(value.shape) for name, value in model.state_dict().items()}
    stored = {name.removeprefix(prefix): info.shape for name, info in _current_names(tensors).items()}
    tied = [{name.removeprefix(prefix) for name in pair} for pair in model.all_tied_weights_keys.items()]
    available = set(stored).union(*(pair for pair in tied if pair & set(stored)))
    if include is not None:
        base_names = {name.removeprefix(prefix) for name in model.base_model.state_dict()}
        expected = {name: shape for name, shape in expected.items() if name in base_names and include(name)}
    ignored_missing, ignored_unexpected = ModelHooks.ignored_on_load(model)
    absent = _not_matching(set(expected) - available, ignored_missing)
    missing = [name for name in absent if not name.startswith(POOLER)]
    unexpected = _not_matching(set(stored) - set(expected), ignored_unexpected)
    report = WeightReport(explanation)
    if missing:
        report.problems.append(f"{len(missing)} tensors are missing: {_shorten(missing)}")
    for name in sorted(set(expected) & set(stored)):
        if expected[name] != stored[name]:
            report.problems.append(f"{name} has shape {stored[name]}, but config.json requires {expected[name]}")
    if unexpected:
        report.warnings.append(f"{len(unexpected)} unexpected tensors: {_shorten(unexpected)}")
    if missing != absent:
        report.warnings.append("no pooler weights: a head that needs the pooler starts with an untrained one")
    return report


def count_layers(architecture: Architecture, tensor_names: Iterable[str]) -> int:
    """The number of layers that tensor names refer to."""
    pattern = re.compile(rf"(?:^|\.){re.escape(architecture.layers)}\.(\d{{1,9}})\.")
    return 1 + max((int(match[1]) for name in tensor_names if (match := pattern.search(name))), default=-1)


def _model_class(config: PreTrainedConfig, architecture: Architecture) -> type[PreTrainedModel] | None:
    """The stock class that the config names, or None if it is not one of the family."""
    names = config.architectures if isinstance(config.architectures, list) else []
    name = str(names[0]).removeprefix("PosEnc") if names else architecture.base.__name__
    cls = getattr(sys.modules[architecture.family.__module__], name, None)
    return cls if isinstance(cls, type) and issubclass(cls, architecture.family) else None


def has_stock_head(config: PreTrainedConfig, architecture: Architecture) -> bool:
    """Whether the config names a model class of transformers."""
    return _model_class(config, architecture) is not None


def build_meta_model(config: PreTrainedConfig, architecture: Architecture) -> PreTrainedModel:
    """Build the config's model on the meta device, without weights."""
    model_class = _model_class(config, architecture)
    if model_class is None:
        name = truncate_repr((config.architectures or [None])[0])
        raise PosEncError(f"config.json names the architecture {name}, which is not a {architecture.model_type} model")
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        with torch.device("meta"), init.no_init_weights():
            return model_class(config)
    except PosEncError:
        raise
    except Exception as error:  # constructors raise many kinds of errors for fields that do not fit together
        raise PosEncError(f"Cannot build a model from config.json: {truncate_repr(error, str)}") from error
    finally:
        logging.set_verbosity(verbosity)


def _current_names(tensors: Mapping[str, TensorInfo]) -> dict[str, TensorInfo]:
    """Tensors under the names that the model has today, without LoRA adapters."""
    renamed = {}
    for name, info in tensors.items():
        if ".lora_" not in name:
            for pattern, replacement in RENAMED_PARAMETERS:
                name = re.sub(pattern, replacement, name)
            renamed[name.replace(".base_layer.", ".")] = info
    return renamed


def _not_matching(names: set[str], patterns: list[str]) -> list[str]:
    return sorted(name for name in names if not any(re.search(pattern, name) for pattern in patterns))


def _shorten(names: list[str]) -> str:
    return truncate_repr(names[:MAX_NAMES_SHOWN]) + (" and others" if len(names) > MAX_NAMES_SHOWN else "")
