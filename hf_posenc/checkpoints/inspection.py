"""Inspect a checkpoint or a training run: what it is and whether it is intact, without loading weights.

The tensors that a config's model needs are compared with those in the headers of the checkpoint's shards.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers import initialization as init
from transformers.utils import CONFIG_NAME, logging

from ..config import VariantConfig
from ..errors import PosEncError
from ..patches import (
    ARCHITECTURES,
    Architecture,
    Explanation,
    build_explanation,
    find_architecture,
    refuse,
    rename_legacy_tables,
)
from ..patches.compat import ModelHooks, base_model_class, load_shapes, set_attn_implementation
from ..spec import PositionScheme
from ..validation import truncate_repr
from .files import MANIFEST_FILE, RUN_STATE_FILE, list_checkpoints, list_pickles, verify_manifest
from .source import merge_tensors, read_config, read_json_object, read_shards

POOLER = "pooler."
"""Heads that do not use the pooler of an encoder leave it out of their checkpoints."""
MAX_NAMES_SHOWN, MAX_PROBLEMS_SHOWN = 4, 3


@dataclasses.dataclass(frozen=True)
class TrainingRun:
    """What a training run has left in its output directory."""

    finished: bool
    checkpoints: dict[str, str | None]
    """Newest first: the problem with each checkpoint, or None if it matches its manifest."""
    latest_valid_checkpoint: str | None


@dataclasses.dataclass
class Inspection:
    """What `inspect_checkpoint` found. The checkpoint is usable if `problems` is empty."""

    directory: Path
    kind: Literal["variant", "stock", "run"]
    weights_directory: Path | None = None
    """The inspected weights: the directory itself, or the latest valid checkpoint of an unfinished run."""
    architecture: str | None = None
    """The class that the model was saved from, or else its model type."""
    position_scheme: PositionScheme | None = None
    base_model: str | None = None
    num_parameters: int = 0
    num_scheme_parameters: int = 0
    shards: dict[str, int] = dataclasses.field(default_factory=dict)
    """Sizes of the weight files in bytes."""
    manifest_verified: bool = False
    """Whether there is a manifest and all files match it."""
    run: TrainingRun | None = None
    explanation: Explanation | None = None
    problems: list[str] = dataclasses.field(default_factory=list)
    warnings: list[str] = dataclasses.field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """The result as plain values, for JSON."""
        return {**dataclasses.asdict(self), "intact": not self.problems}

    def __str__(self) -> str:
        rows: list[tuple[str, object]] = []
        if self.run is not None:
            state = "finished" if self.run.finished else "not finished"
            rows.append(("run", f"{state}; latest valid checkpoint: {self.run.latest_valid_checkpoint or 'none'}"))
            rows += [("", f"{name}: {problem or 'valid'}") for name, problem in self.run.checkpoints.items()]
        if self.weights_directory not in (None, self.directory):
            rows.append(("weights", self.weights_directory))
        if self.architecture is not None:
            is_stock = self.position_scheme is None
            scheme = "stock encoding" if is_stock else truncate_repr(self.position_scheme, json.dumps)
            rows += [("architecture", self.architecture), ("scheme", scheme)]
            rows.append(("base model", self.base_model or "not recorded"))
        if self.shards:
            rows.append(("parameters", f"{self.num_parameters:,}, {self.num_scheme_parameters:,} in the scheme"))
            checked = ", checksum verified" if self.manifest_verified else ""
            rows += [("weights file", f"{name} ({size:,} bytes{checked})") for name, size in self.shards.items()]
        lines = [f"{self.directory}: {self.kind}", *(f"  {label:<13} {value}" for label, value in rows)]
        if self.explanation is not None and self.explanation.layers:
            lines += [f"  {line}" for line in str(self.explanation).splitlines()]
        return "\n".join([*lines, *(f"  warning: {warning}" for warning in self.warnings)])


def inspect_checkpoint(directory: str | Path) -> Inspection:
    """Inspect a variant, a stock checkpoint, or the output directory of a training run.

    Args:
        directory: The directory to inspect.

    Returns:
        What it contains. Damage is listed in `problems`.

    Raises:
        PosEncError: If the directory contains neither a supported checkpoint nor a training run.

    Example:
        >>> inspection = hf_posenc.inspect_checkpoint("gpt2-rope")
        >>> inspection.problems
        []
    """
    directory = Path(directory).expanduser()
    if not directory.is_dir():
        raise PosEncError(f"{directory} is not a directory; expected a checkpoint or the output of a training run")
    has_run, has_config = ((directory / name).is_file() for name in (RUN_STATE_FILE, CONFIG_NAME))
    if not (has_run or has_config):
        raise PosEncError(
            f"{directory} has neither {CONFIG_NAME} nor {RUN_STATE_FILE}: it is not a checkpoint or a training run"
        )
    result = Inspection(directory, "run" if has_run else "stock")
    if has_run:
        finished = read_json_object(directory / RUN_STATE_FILE).get("finished") is True
        checkpoints = {path.name: verify_manifest(path) for path in list_checkpoints(directory)}
        latest = next((name for name, problem in checkpoints.items() if problem is None), None)
        result.run = TrainingRun(finished, checkpoints, latest)
        result.problems += [f"{name}: {problem}" for name, problem in checkpoints.items() if problem is not None]
        result.weights_directory = None if latest is None else directory / latest
    if has_config:
        result.weights_directory = directory
    result.warnings += [f"{name} looks like a pickle; it is never read" for name in list_pickles(directory)]
    if result.weights_directory is not None:
        _inspect_weights(result, result.weights_directory)
    return result


def _inspect_weights(result: Inspection, directory: Path) -> None:
    config = read_config(directory)
    if isinstance(config, VariantConfig):
        result.position_scheme = config.position_scheme
        result.base_model = None if config.base_model is None else truncate_repr(config.base_model, str)
        result.kind = "variant" if result.kind == "stock" else result.kind
    elif config.model_type not in ARCHITECTURES:
        raise refuse(config.model_type, directory)
    names = config.architectures if isinstance(config.architectures, list) else []
    result.architecture = truncate_repr(names[0] if names else config.model_type, str)
    if (directory / MANIFEST_FILE).is_file():
        problem = verify_manifest(directory)
        result.manifest_verified = problem is None
        result.problems += [] if problem is None else [f"{directory}: {problem}"]
    try:
        shards = read_shards(directory)
    except PosEncError as error:
        result.problems.append(str(error))
        return
    tensors = merge_tensors(shards)
    result.shards = {shard.path.name: shard.path.stat().st_size for shard in shards}
    result.num_parameters = sum(tensor.numel() for tensor in tensors.values())
    result.num_scheme_parameters = sum(tensors[name].numel() for name in tensors if is_scheme_parameter(name))
    result.explanation, problems, warnings = check_weights(config, tensors)
    result.problems += problems
    result.warnings += warnings


def is_scheme_parameter(name: str) -> bool:
    """Whether a parameter belongs to a position scheme rather than to the stock model."""
    return "position_scheme." in name


def check_weights(
    config: PreTrainedConfig, tensors: Mapping[str, torch.Tensor], base_only: bool = False
) -> tuple[Explanation | None, list[str], list[str]]:
    """Compare tensors with a config's model; with `base_only`, neither its head nor its position table.

    Returns what runs in the model, why the weights do not fit it, and what is unusual but harmless.
    """
    architecture = find_architecture(config)
    assert architecture is not None
    required_layers, num_layers = architecture.shape(config).num_layers, _count_layers(tensors)
    if required_layers > num_layers:
        return None, [f"config.json has {required_layers} layers, but the weights have {num_layers}"], []
    model = build_meta_model(config, architecture, base_only)
    explanation = build_explanation(model)
    if getattr(config, "quantization_config", None):
        return explanation, [], ["quantized weights: completeness was not checked"]
    expected, tied = set(model.state_dict()), list(model.all_tied_weights_keys.items())
    compared = expected
    if base_only:
        prefix = base_prefix(model, architecture)
        compared = {name for name in expected if name.startswith(prefix)} - {f"{prefix}{architecture.table}.weight"}
    ignored_missing, ignored_unexpected = ModelHooks.ignored_on_load(model)
    stored = _without_adapters(tensors)
    missing, unexpected, mismatched = load_shapes(model, stored, rename_legacy_tables)
    # One of two tied parameters is enough.
    missing -= {name for pair in tied if not set(pair) <= missing for name in pair}
    absent = _not_matching(missing & compared, ignored_missing)
    missing_names = [name for name in absent if POOLER not in name]
    problems, warnings = [], []
    if missing_names:
        problems.append(f"{len(missing_names)} tensors are missing: {_shorten(missing_names)}")
    for name, stored_shape, shape in mismatched:
        if name in compared:
            shapes = f"shape {tuple(stored_shape)}, but config.json requires {tuple(shape)}"
            problems.append(f"{name} has {shapes}")
    unexpected_names = _not_matching(unexpected, ignored_unexpected)
    if unexpected_names:
        warnings.append(f"{len(unexpected_names)} unexpected tensors: {_shorten(unexpected_names)}")
    if missing_names != absent:
        warnings.append("no pooler weights: a head that needs the pooler starts with an untrained one")
    return explanation, problems, warnings


def check_base_weights(config: PreTrainedConfig, tensors: Mapping[str, torch.Tensor]) -> None:
    """Refuse weights of a base model that do not fit its config, before anything is built in their sizes."""
    _, problems, _ = check_weights(config, tensors, base_only=True)
    if problems:
        raise PosEncError(f"The weights do not fit config.json: {'; '.join(problems[:MAX_PROBLEMS_SHOWN])}")


def _count_layers(tensors: Mapping[str, torch.Tensor]) -> int:
    """The number of layers with weights: the outermost index in the names of tensors."""
    return len({match[0] for name in tensors if (match := re.search(r"(?<=\.)\d+(?=\.)|^\d+(?=\.)", name))})


def base_prefix(model: PreTrainedModel, architecture: Architecture) -> str:
    """The prefix of the parameters of the base model inside a model."""
    name = next(name for name, module in model.named_modules() if isinstance(module, architecture.base))
    return f"{name}." if name else ""


def build_meta_model(config: PreTrainedConfig, architecture: Architecture, base_only: bool) -> PreTrainedModel:
    """Build the stock class that a config names on the meta device. One without a head will do for `base_only`."""
    names = config.architectures if isinstance(config.architectures, list) else []
    without_head = base_model_class(architecture.config_class)
    name = str(names[0]).removeprefix("PosEnc") if names else without_head.__name__
    model_class = getattr(sys.modules[architecture.family.__module__], name, None)
    if not (isinstance(model_class, type) and issubclass(model_class, architecture.family)):
        if not base_only:
            raise PosEncError(
                f"config.json names the architecture {truncate_repr(names[0])}, which is not a "
                f"{architecture.model_type} model"
            )
        model_class = without_head
    if base_only:
        config = copy.deepcopy(config)
        set_attn_implementation(config, "eager")  # nothing is computed, so no kernel has to be installed
    try:
        with torch.device("meta"), init.no_init_weights(), without_warnings():
            return model_class(config)
    except PosEncError:
        raise
    except Exception as error:  # constructors raise many kinds of errors for fields that do not fit together
        raise PosEncError(f"Cannot build a model from config.json: {truncate_repr(error, str)}") from error


@contextmanager
def without_warnings() -> Iterator[None]:
    """Silence warnings of transformers: unused heads are expected, and callers report missing weights."""
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)


def _without_adapters(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors of the model itself, without LoRA adapters."""
    return {name.replace(".base_layer.", "."): tensor for name, tensor in tensors.items() if ".lora_" not in name}


def _not_matching(names: set[str], patterns: list[str]) -> list[str]:
    return sorted(name for name in names if not any(re.search(pattern, name) for pattern in patterns))


def _shorten(names: list[str]) -> str:
    return truncate_repr(names[:MAX_NAMES_SHOWN]) + (" and others" if len(names) > MAX_NAMES_SHOWN else "")
