"""What a directory holds, and whether it is whole, by configs, headers and checksums: no weights are loaded."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any, Literal

from ..config import VariantConfig
from ..patches.explanation import Explanation
from ..patches.live_models import ARCHITECTURES
from ..validation import truncate_repr
from ._names import RUN_STATE_FILE, is_scheme_parameter, list_checkpoints
from .config_file import read_config, read_fields, read_json
from .expected_weights import compare
from .manifest import MANIFEST, verify_manifest
from .shards import Shard, pickles_in, read_shards

Kind = Literal["variant", "stock", "run"]


@dataclasses.dataclass(frozen=True)
class RunState:
    """What a training run has left in its output directory."""

    finished: bool
    checkpoints: dict[str, str | None]
    """Newest first: what is wrong with each, None if it is as it was written."""

    @property
    def last_whole(self) -> str | None:
        return next((name for name, problem in self.checkpoints.items() if problem is None), None)


@dataclasses.dataclass
class Inspection:
    """What was found; `problems` is empty if it can be used."""

    directory: Path
    kind: Kind
    weights: Path | None = None
    """Where the weights are that all else is said of: the directory, or the last whole checkpoint of its run."""
    architecture: str | None = None
    """The class that it was saved from, or else the model type."""
    position_scheme: Any = None
    base_model: str | None = None
    parameters: int = 0
    scheme_parameters: int = 0
    files: dict[str, int] = dataclasses.field(default_factory=dict)
    """Shards whose headers fit their sizes, and these sizes in bytes."""
    sealed: bool = False
    """Whether there is a manifest, and every file is as it says."""
    run: RunState | None = None
    explanation: Explanation | None = None
    problems: list[str] = dataclasses.field(default_factory=list)
    warnings: list[str] = dataclasses.field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """Plain values, for programs."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        for name in ("directory", "weights"):
            values[name] = None if values[name] is None else str(values[name])
        if self.run is not None:
            values["run"] = {**dataclasses.asdict(self.run), "last_whole": self.run.last_whole}
        if self.explanation is not None:
            values["explanation"] = dataclasses.asdict(self.explanation)
        return {**values, "healthy": not self.problems}

    def __str__(self) -> str:
        lines = [f"{self.directory}: {self.kind}"]
        if self.run is not None:
            state = "finished" if self.run.finished else "not finished"
            lines.append(f"  run           {state}; last whole checkpoint: {self.run.last_whole or 'none'}")
            lines += [f"    {name}: {problem or 'whole'}" for name, problem in self.run.checkpoints.items()]
        if self.weights is not None and self.weights != self.directory:
            lines.append(f"  weights       {self.weights}")
        if self.architecture is not None:
            scheme = (
                "none of ours (a stock model)"
                if self.kind == "stock"
                else truncate_repr(self.position_scheme, json.dumps)
            )
            lines.append(f"  architecture  {self.architecture}")
            lines.append(f"  scheme        {scheme}")
            lines.append(f"  base model    {self.base_model or 'not recorded'}")
        if self.files:
            lines.append(f"  parameters    {self.parameters:,}, of the scheme {self.scheme_parameters:,}")
            lines += [
                f"  {'whole' if self.sealed else 'file':<13} {name} ({size:,} bytes)"
                for name, size in self.files.items()
            ]
        if self.explanation is not None and self.explanation.layers:
            lines += [f"  {line}" for line in str(self.explanation).splitlines()]
        lines += [f"  warning: {warning}" for warning in self.warnings]
        return "\n".join(lines)


def inspect(directory: str | Path) -> Inspection:
    """Look at the directory of a variant, a stock checkpoint or a training run, or at a checkpoint of one.

    Damage is in the `problems` of what is returned. Raises ValueError if there is nothing to inspect.
    """
    directory = Path(directory).expanduser()
    if not directory.is_dir():
        raise ValueError(f"{directory} is no directory; name that of a checkpoint or of a training run")
    run = _run_in(directory)
    has_config = (directory / "config.json").is_file()
    if run is None and not has_config:
        raise ValueError(
            f"{directory} has neither a config.json nor a {RUN_STATE_FILE}: it is no checkpoint of transformers, nor "
            "the output directory of `hf-posenc train`"
        )
    found = Inspection(directory, "run" if run is not None else "stock", run=run)
    if run is not None:
        found.problems += [f"{name}: {problem}" for name, problem in run.checkpoints.items() if problem is not None]
    whole = None if run is None or run.last_whole is None else directory / run.last_whole
    found.weights = directory if has_config else whole
    found.warnings += [
        f"{name} is a pickle by its name: it is not read, and need not be" for name in pickles_in(directory)
    ]
    if found.weights is not None:
        _look_at_weights(found, found.weights)
    return found


def _run_in(directory: Path) -> RunState | None:
    if not (directory / RUN_STATE_FILE).is_file():
        return None
    finished = read_json(directory / RUN_STATE_FILE).get("finished") is True
    return RunState(finished, {path.name: verify_manifest(path) for path in list_checkpoints(directory)})


def _look_at_weights(found: Inspection, directory: Path) -> None:
    model_type = read_fields(directory)["model_type"]
    config = read_config(directory)
    if not isinstance(config, VariantConfig) and model_type not in ARCHITECTURES:
        raise ValueError(
            f"{directory} holds a {truncate_repr(model_type)} model; hf_posenc knows {sorted(ARCHITECTURES)} and variants"
        )
    if isinstance(config, VariantConfig):
        config.position_specs  # noqa: B018
        found.position_scheme = config.position_scheme
        found.base_model = None if config.base_model is None else truncate_repr(config.base_model).strip("'\"")
        found.kind = "variant" if found.kind == "stock" else found.kind
    names = config.architectures if isinstance(config.architectures, list) else []
    found.architecture = truncate_repr(names[0] if names else model_type).strip("'\"")
    shards: tuple[Shard, ...] = ()
    try:
        shards = read_shards(directory)
    except ValueError as error:
        found.problems.append(str(error))
    if (directory / MANIFEST).is_file():
        problem = verify_manifest(directory)
        found.sealed = problem is None
        if problem is not None:
            found.problems.append(f"{directory}: {problem}")
    if shards:
        found.files = {shard.path.name: shard.path.stat().st_size for shard in shards}
        tensors = {name: entry for shard in shards for name, entry in shard.entries.items()}
        found.parameters = sum(entry.numbers for entry in tensors.values())
        found.scheme_parameters = sum(entry.numbers for name, entry in tensors.items() if is_scheme_parameter(name))
        found.explanation, problems, warnings = compare(config, tensors)
        found.problems += problems
        found.warnings += warnings
