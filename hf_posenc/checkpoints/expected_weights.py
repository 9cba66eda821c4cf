"""The tensors that a config's model has, beside those that a checkpoint's headers tell of. No weight is read."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from transformers import initialization as init
from transformers.utils import logging

from ..config import VariantConfig
from ..patches.architecture import Architecture
from ..patches.explanation import Explanation, build_explanation
from ..patches.legacy import LEGACY_PARAMETER, LEGACY_TABLE
from ..patches.live_models import ARCHITECTURES
from ..validation import truncate_repr
from .shards import Entry

Tensors = Mapping[str, Entry]
RENAMED = (
    (LEGACY_TABLE, LEGACY_PARAMETER),
    (r"LayerNorm\.gamma$", "LayerNorm.weight"),
    (r"LayerNorm\.beta$", "LayerNorm.bias"),
)
"""Names of older transformers, which are read under those of today."""
OPTIONAL = "pooler."
"""Of BERT, which heads that do not need it leave out of a checkpoint."""
_NAMED = 4


def compare(
    config: Any, tensors: Tensors, only: Callable[[str], bool] | None = None
) -> tuple[Explanation | None, list[str], list[str]]:
    """What acts in the model that a config tells of; what is wrong with the tensors for it; and what is odd.

    With `only`, what is wrong with those tensors of the base model whose names it takes.
    """
    stock = config.stock_class.model_type if isinstance(config, VariantConfig) else config.model_type
    architecture = ARCHITECTURES[stock]
    layers = layers_in(architecture, tensors)
    if config.num_hidden_layers > layers:
        return None, [f"config.json is of {config.num_hidden_layers} layers, and the weights are of {layers}"], []
    model = skeleton(config, architecture)
    explanation = build_explanation(model)
    if getattr(config, "quantization_config", None):
        return explanation, [], ["its weights are quantised: that there are all of them was not checked"]
    prefix = architecture.base.base_model_prefix + "."
    wanted = {_within(name, prefix): tuple(value.shape) for name, value in model.state_dict().items()}
    found = {_within(name, prefix): entry.shape for name, entry in _plain(tensors).items()}
    tied = {(_within(one, prefix), _within(other, prefix)) for one, other in model.all_tied_weights_keys.items()}
    there = set(found) | {name for pair in tied if set(pair) & set(found) for name in pair}
    if only is not None:
        base = {_within(name, prefix) for name in model.base_model.state_dict()}
        wanted = {name: shape for name, shape in wanted.items() if name in base and only(name)}
    absent = _not_ignored(set(wanted) - there, model._keys_to_ignore_on_load_missing)
    missing = [name for name in absent if not name.startswith(OPTIONAL)]
    unexpected = _not_ignored(set(found) - set(wanted), model._keys_to_ignore_on_load_unexpected)
    problems = (
        [f"{len(missing)} tensors that the config's model needs are missing: {_some(missing)}"] if missing else []
    )
    for name in sorted(set(wanted) & set(found)):
        if wanted[name] != found[name]:
            problems.append(f"{name} is of shape {found[name]}, and the config's model needs {wanted[name]}")
    odd = (
        [f"{len(unexpected)} tensors that the config's model does not have: {_some(unexpected)}"] if unexpected else []
    )
    if missing != absent:
        odd.append(f"there is no {OPTIONAL[:-1]}: whoever needs it gets one that is not trained")
    return explanation, problems, odd


def layers_in(architecture: Architecture, tensors: Tensors) -> int:
    """How many layers the names of tensors tell of."""
    number = re.compile(rf"(?:^|\.){re.escape(architecture.layers)}\.(\d{{1,9}})\.")
    return 1 + max((int(found[1]) for name in tensors if (found := number.search(name))), default=-1)


def _class_of(config: Any, architecture: Architecture) -> Any:
    """The stock class that a config names, or None if it is none of the family."""
    names = config.architectures if isinstance(config.architectures, list) else []
    name = str(names[0]).removeprefix("PosEnc") if names else architecture.base.__name__
    cls = getattr(sys.modules[architecture.family.__module__], name, None)
    return cls if isinstance(cls, type) and issubclass(cls, architecture.family) else None


def knows_head(config: Any, architecture: Architecture) -> bool:
    """Whether the model that a config names is one of transformers' own."""
    return _class_of(config, architecture) is not None


def skeleton(config: Any, architecture: Architecture) -> Any:
    """The model that a config tells of, without any numbers in it."""
    cls = _class_of(config, architecture)
    if cls is None:
        name, known = config.architectures[0], architecture.base.__name__
        raise ValueError(f"config.json names the architecture {truncate_repr(name)}, which is none of {known}'s family")
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        with torch.device("meta"), init.no_init_weights():
            return cls(config)
    except ValueError:
        raise
    except Exception as error:  # whatever the stock constructors make of fields that do not go together
        raise ValueError(f"no model can be built from config.json: {truncate_repr(error)}") from error
    finally:
        logging.set_verbosity(verbosity)


def _plain(tensors: Tensors) -> dict[str, Entry]:
    """Under the names of today, and without adapters that a run has put in."""
    plain = {}
    for name, entry in tensors.items():
        if ".lora_" not in name:
            for old, new in RENAMED:
                name = re.sub(old, new, name)
            plain[name.replace(".base_layer.", ".")] = entry
    return plain


def _within(name: str, prefix: str) -> str:
    """A name as the model without a head has it: checkpoints of a head and of none are read by either."""
    return name.removeprefix(prefix)


def _not_ignored(names: set[str], patterns: Any) -> list[str]:
    return sorted(name for name in names if not any(re.search(pattern, name) for pattern in patterns or ()))


def _some(names: list[str]) -> str:
    return truncate_repr(names[:_NAMED]) + (" and others" if len(names) > _NAMED else "")
