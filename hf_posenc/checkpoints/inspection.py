"""Inspect a checkpoint or a training run: what it is and whether it is intact, without loading weights."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any, Literal

from transformers.utils import CONFIG_NAME

from ..config import VariantConfig
from ..errors import PosEncError
from ..patches import ARCHITECTURES, Explanation
from ..spec import PositionScheme
from ..validation import truncate_repr
from .files import MANIFEST_FILE, RUN_STATE_FILE, list_checkpoints, list_pickles, verify_manifest
from .shards import read_shards
from .source import read_config, read_json_object
from .weight_check import check_weights, is_scheme_parameter


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
        raise PosEncError(
            f"{directory} has the unsupported model type {truncate_repr(config.model_type)}; expected a variant or one "
            f"of {sorted(ARCHITECTURES)}"
        )
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
    tensors = {name: tensor for shard in shards for name, tensor in shard.tensors.items()}
    result.shards = {shard.path.name: shard.path.stat().st_size for shard in shards}
    result.num_parameters = sum(tensor.numel() for tensor in tensors.values())
    result.num_scheme_parameters = sum(tensors[name].numel() for name in tensors if is_scheme_parameter(name))
    report = check_weights(config, tensors)
    result.explanation = report.explanation
    result.problems += report.problems
    result.warnings += report.warnings
