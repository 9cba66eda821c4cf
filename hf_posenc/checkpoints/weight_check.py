"""Compare the tensors that a config's model needs with those in a checkpoint's headers. No weights are read."""

from __future__ import annotations

import copy
import dataclasses
import re
import sys
from collections.abc import Mapping

import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers import initialization as init
from transformers.utils import logging

from ..config import VariantConfig
from ..errors import PosEncError
from ..patches import ARCHITECTURES, LEGACY_PARAMETER, LEGACY_TABLE, Architecture, Explanation, build_explanation
from ..patches.compat import ModelHooks, set_attn_implementation
from ..validation import truncate_repr

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
    config: PreTrainedConfig, tensors: Mapping[str, torch.Tensor], base_only: bool = False
) -> WeightReport:
    """Compare tensors with a config's model; with `base_only`, neither its head nor its position table."""
    architecture = ARCHITECTURES[
        config.stock_class.model_type if isinstance(config, VariantConfig) else config.model_type
    ]
    layer = re.compile(rf"(?:^|\.){re.escape(architecture.layers)}\.(\d{{1,9}})\.")
    num_layers = 1 + max((int(match[1]) for name in tensors if (match := layer.search(name))), default=-1)
    if config.num_hidden_layers > num_layers:
        problem = f"config.json has {config.num_hidden_layers} layers, but the weights have {num_layers}"
        return WeightReport(problems=[problem])
    model = _build_meta_model(config, architecture, base_only)
    report = WeightReport(build_explanation(model))
    if getattr(config, "quantization_config", None):
        report.warnings.append("quantized weights: completeness was not checked")
        return report
    # Names are compared as the base model has them: transformers loads checkpoints with and without a head alike.
    prefix = architecture.base.base_model_prefix + "."
    expected = {name.removeprefix(prefix): value.shape for name, value in model.state_dict().items()}
    stored = {name.removeprefix(prefix): value.shape for name, value in _current_names(tensors).items()}
    tied = [{name.removeprefix(prefix) for name in pair} for pair in model.all_tied_weights_keys.items()]
    available = set(stored).union(*(pair for pair in tied if pair & set(stored)))
    if base_only:
        compared = {name.removeprefix(prefix) for name in model.base_model.state_dict()} - {
            f"{architecture.table}.weight"
        }
        expected = {name: shape for name, shape in expected.items() if name in compared}
    ignored_missing, ignored_unexpected = ModelHooks.ignored_on_load(model)
    absent = _not_matching(set(expected) - available, ignored_missing)
    missing = [name for name in absent if not name.startswith(POOLER)]
    unexpected = _not_matching(set(stored) - set(expected), ignored_unexpected)
    if missing:
        report.problems.append(f"{len(missing)} tensors are missing: {_shorten(missing)}")
    for name in sorted(set(expected) & set(stored)):
        if expected[name] != stored[name]:
            shapes = f"shape {tuple(stored[name])}, but config.json requires {tuple(expected[name])}"
            report.problems.append(f"{name} has {shapes}")
    if unexpected:
        report.warnings.append(f"{len(unexpected)} unexpected tensors: {_shorten(unexpected)}")
    if missing != absent:
        report.warnings.append("no pooler weights: a head that needs the pooler starts with an untrained one")
    return report


def _build_meta_model(config: PreTrainedConfig, architecture: Architecture, base_only: bool) -> PreTrainedModel:
    """Build the stock class that a config names on the meta device. A base model will do for `base_only`."""
    names = config.architectures if isinstance(config.architectures, list) else []
    name = str(names[0]).removeprefix("PosEnc") if names else architecture.base.__name__
    model_class = getattr(sys.modules[architecture.family.__module__], name, None)
    if not (isinstance(model_class, type) and issubclass(model_class, architecture.family)):
        if not base_only:
            raise PosEncError(
                f"config.json names the architecture {truncate_repr(names[0])}, which is not a "
                f"{architecture.model_type} model"
            )
        model_class = architecture.base
    if base_only:
        config = copy.deepcopy(config)
        set_attn_implementation(config, "eager")  # nothing is computed, so no kernel has to be installed
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


def _current_names(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors under the names that the model has today, without LoRA adapters."""
    renamed = {}
    for name, tensor in tensors.items():
        if ".lora_" not in name:
            for pattern, replacement in RENAMED_PARAMETERS:
                name = re.sub(pattern, replacement, name)
            renamed[name.replace(".base_layer.", ".")] = tensor
    return renamed


def _not_matching(names: set[str], patterns: list[str]) -> list[str]:
    return sorted(name for name in names if not any(re.search(pattern, name) for pattern in patterns))


def _shorten(names: list[str]) -> str:
    return truncate_repr(names[:MAX_NAMES_SHOWN]) + (" and others" if len(names) > MAX_NAMES_SHOWN else "")
