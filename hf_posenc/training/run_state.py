"""The record of a training run in its output directory: what it was asked to do, and whether it has finished."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

from transformers import TrainingArguments

from ..checkpoints import (
    COMPANION_FILES,
    LENGTH_CURVE_FILE,
    RECOVERY_FILE,
    RUN_STATE_FILE,
    list_checkpoints,
    read_json_object,
    write_text,
)
from ..errors import PosEncError
from ..validation import truncate_repr
from .arguments import TrainRequest, rows_per_step
from .checkpointing import STAGING_DIRECTORY
from .data import SELF_EVAL_FILE, SELF_GENERATED_FILE
from .fingerprints import TEACHER, Fingerprint

TEACHER_CACHE = "teacher_cache"
"""The directory of the teacher's predictions, inside the output directory, until the run is finished."""
RUN_FILES = (
    *("config.json", "model*.safetensors", "model.safetensors.index.json", "training_args.json"),
    *(*COMPANION_FILES, SELF_GENERATED_FILE, SELF_EVAL_FILE, RECOVERY_FILE, LENGTH_CURVE_FILE),
)
"""Files that a run leaves in its output directory, and `--restart` deletes."""
RESUME_ARGUMENTS = (
    *("max_steps", "num_train_epochs", "learning_rate", "seed", "data_seed", "bf16", "fp16", "lr_scheduler_type"),
    *("warmup_steps", "lr_scheduler_kwargs", "weight_decay", "max_grad_norm", "optim", "adam_beta1", "adam_beta2"),
    *("adam_epsilon", "label_smoothing_factor"),
)
"""TrainingArguments that must not change on resuming, besides the rows per step over all devices."""
RUN_STATE_SECTIONS = ("request", "arguments", "checkpoints", "dataset", "measured")


class RunState:
    """The record of a run in run.json: its arguments, fingerprints of checkpoints and data, and whether it is done."""

    def __init__(self, directory: Path, request: TrainRequest, arguments: TrainingArguments, restart: bool) -> None:
        """Raises PosEncError if the directory holds something else, a different run, or a finished one."""
        self.path = directory / RUN_STATE_FILE
        recorded = {name: getattr(arguments, name) for name in RESUME_ARGUMENTS}
        recorded["rows_per_step"] = rows_per_step(arguments)
        values = {"request": dataclasses.asdict(request), "arguments": recorded}
        self.values: dict[str, Any] = json.loads(json.dumps(values, default=str))
        self._previous: dict[str, Any] = {}
        self.needs_clearing = restart
        """Whether there is an earlier run to delete."""
        if not self.path.is_file():
            if list_checkpoints(directory) or (directory / "config.json").exists():
                raise PosEncError(f"{directory} is not empty and holds no training run: choose another --output-dir")
        elif not restart:
            self._previous = _read_run_state(self.path)
            if self._previous.pop("clearing", False):  # killed while it deleted an earlier run
                self._previous, self.needs_clearing = {}, True
        if "dataset" in self._previous:  # else it never started to train
            self._refuse_changes("request")
            self._refuse_changes("arguments")
        if self._previous.get("finished"):
            for leftover in (STAGING_DIRECTORY, TEACHER_CACHE):  # if it was killed at the very end
                shutil.rmtree(directory / leftover, ignore_errors=True)
            raise PosEncError(
                f"{directory} holds a finished run: load it with from_pretrained, push it with hf-posenc push, choose "
                "another --output-dir, or start over with --restart"
            )

    @property
    def measured(self) -> dict[str, dict[str, float]]:
        """What was measured before the run was interrupted."""
        return self._previous.get("measured", {})

    def set_checkpoints(self, fingerprints: dict[str, Fingerprint]) -> None:
        """Record the hashes of the model and the teacher. Raises PosEncError if they were edited since the start.

        The warm start, the teacher's predictions and self-generated text would come from different weights.
        """
        self.values["checkpoints"] = fingerprints
        recorded = self._previous.get("checkpoints", {}) if "dataset" in self._previous else {}
        for role, now in fingerprints.items():
            before = recorded.get(role, now)
            if before != now:
                changed = [name for name in now if not isinstance(before, dict) or before.get(name) != now[name]]
                source = self.values["request"]["teacher_model" if role == TEACHER else "model"]
                raise PosEncError(
                    f"The {role} {source} has changed since the run in {self.path.parent} was started: "
                    f"{truncate_repr(', '.join(changed), str)}. Restore it to resume the run, choose another "
                    "--output-dir, or start over with --restart"
                )

    def set_dataset(self, fingerprint: dict[str, Any]) -> None:
        """Record the fingerprint of the rows. Raises PosEncError if they have changed since the run was started."""
        self.values["dataset"] = fingerprint
        if "dataset" in self._previous:
            self._refuse_changes("dataset")

    def _refuse_changes(self, section: str) -> None:
        before, now = self._previous.get(section, {}), self.values[section]
        changed = [key for key in sorted({*before, *now}) if before.get(key) != now.get(key)]
        if changed:
            changes = "; ".join(f"{key} was {before.get(key)!r} and is now {now.get(key)!r}" for key in changed)
            raise PosEncError(
                f"{self.path.parent} holds a different run: {changes}. Rerun with the same arguments to resume it, "
                "choose another --output-dir, or start over with --restart"
            )

    def save(self, **values: Any) -> None:
        """Write run.json, with further values."""
        self.values |= {"finished": False, **values}
        write_text(self.path, json.dumps(self.values, indent=1))

    def clear(self) -> None:
        """Delete everything that the run has written but run.json, which marks the directory as a run's."""
        directory = self.path.parent
        self.save(clearing=True)
        for path in {path for pattern in RUN_FILES for path in directory.glob(pattern) if path.is_file()}:
            path.unlink()
        for checkpoint in (*list_checkpoints(directory), directory / STAGING_DIRECTORY, directory / TEACHER_CACHE):
            shutil.rmtree(checkpoint, ignore_errors=True)
        self.values.pop("clearing")
        self.save()


def _read_run_state(path: Path) -> dict[str, Any]:
    """Read run.json. Raises PosEncError if it is not what `RunState.save` writes."""
    advice = "start over with --restart, or choose another --output-dir"
    try:
        values = read_json_object(path)
    except PosEncError as error:
        raise PosEncError(f"{error}; {advice}") from None
    damaged = [name for name in RUN_STATE_SECTIONS if not isinstance(values.get(name, {}), dict)]
    stages = values["measured"].values() if isinstance(values.get("measured"), dict) else ()
    if damaged or not all(isinstance(metrics, dict) for metrics in stages):
        raise PosEncError(f"{path} is damaged (wrong values of {', '.join(damaged) or 'measured'}); {advice}")
    return values
