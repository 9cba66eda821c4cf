"""Trainer checkpoints that are atomic, verified by checksums and free of pickles.

A checkpoint is written to a staging directory, listed in a manifest, and then renamed: whenever a run is killed, every
`checkpoint-N` is complete.

`Trainer` has no public hooks for how checkpoints are written and read. This module is the only one that overrides its
private methods.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn
from transformers.trainer_utils import TrainOutput
from transformers.utils import logging

from ..checkpoints import (
    checkpoint_step,
    fsync,
    is_out_of_space,
    list_checkpoints,
    read_shards,
    verify_manifest,
    write_manifest,
)
from ..errors import PosEncError
from .optimizer import is_adapter_parameter, merge_adapters
from .state_files import (
    gather_optimizer_state,
    gather_weights,
    get_rng_state,
    read_state,
    scatter_optimizer_state,
    set_rng_state,
    write_state,
)

logger = logging.get_logger(__name__)
STAGING_DIRECTORY = ".unfinished"
TRAINER_STATE_FILE = "trainer_state.json"
OPTIMIZER_FILE, SCHEDULER_FILE = "optimizer.safetensors", "scheduler.safetensors"
ADAPTERS_FILE, SCALER_FILE = "adapters.safetensors", "scaler.safetensors"


def last_valid_checkpoint(directory: Path) -> Path | None:
    """The newest checkpoint that matches its manifest; logs a warning for each that does not."""
    for checkpoint in list_checkpoints(directory):
        problem = verify_manifest(checkpoint)
        if problem is None:
            return checkpoint
        logger.warning(f"Skipping the damaged checkpoint {checkpoint}: {problem}")
    return None


class AtomicCheckpoints:
    """Mixin for a `Trainer`, to inherit from before it."""

    has_adapters: bool
    _staging: Path | None = None

    def _save_checkpoint(self: Any, model: nn.Module, trial: Any) -> None:
        self.check_finite_weights()
        output_dir = Path(super()._get_output_dir(trial))  # type: ignore[misc]
        checkpoint = output_dir / f"checkpoint-{self.state.global_step}"
        self._staging = output_dir / STAGING_DIRECTORY
        try:
            super()._save_checkpoint(model, trial)  # type: ignore[misc]
            self.accelerator.wait_for_everyone()
            if self.args.should_save:
                self._publish(self._staging / checkpoint.name, checkpoint)
        except BaseException:
            shutil.rmtree(self._staging, ignore_errors=True)
            raise
        finally:
            self._staging = None
        self.accelerator.wait_for_everyone()

    def _publish(self: Any, staged: Path, checkpoint: Path) -> None:
        if self.state.best_global_step:  # names the staging directory so far
            best = checkpoint.with_name(f"checkpoint-{self.state.best_global_step}")
            self.state.best_model_checkpoint = str(best)
            self.state.save_to_json(str(staged / TRAINER_STATE_FILE))
        write_manifest(staged)
        if checkpoint.exists():
            shutil.rmtree(checkpoint)
        staged.rename(checkpoint)
        staged.parent.rmdir()
        fsync(checkpoint.parent)
        rotate_checkpoints(checkpoint, self.args.save_total_limit, self.state.best_model_checkpoint)

    def _get_output_dir(self: Any, trial: Any) -> str:
        return str(self._staging) if self._staging else super()._get_output_dir(trial)  # type: ignore[misc]

    def save_model(self: Any, output_dir: str | None = None, _internal_call: bool = False) -> None:
        if not self.is_fsdp_enabled:
            super().save_model(output_dir, _internal_call)  # type: ignore[misc]
            return
        weights = gather_weights(self.model)
        if self.args.should_save:
            self._save(output_dir, weights)

    def _save(self: Any, output_dir: str | None = None, state_dict: dict[str, torch.Tensor] | None = None) -> None:
        if not self.args.should_save:  # newer versions of transformers call it in every process
            super()._save(output_dir, state_dict)  # type: ignore[misc]
            return
        directory = Path(output_dir or self.args.output_dir)
        if self.has_adapters:
            weights = self.model.state_dict() if state_dict is None else state_dict
            if self._staging:  # a checkpoint to resume from, not the final model
                directory.mkdir(parents=True, exist_ok=True)
                adapters = {name: weight for name, weight in weights.items() if is_adapter_parameter(name)}
                write_state(adapters, directory / ADAPTERS_FILE)
            state_dict = merge_adapters(self.model, weights)
        super()._save(output_dir, state_dict)  # type: ignore[misc]
        (directory / "training_args.bin").unlink(missing_ok=True)  # a pickle
        arguments = json.dumps(self.args.to_sanitized_dict(), indent=1, default=str)
        (directory / "training_args.json").write_text(arguments, encoding="utf-8")

    def train(self: Any, resume_from_checkpoint: str | None = None, **kwargs: Any) -> TrainOutput:
        if resume_from_checkpoint and self.is_fsdp_enabled:  # before the weights are sharded
            self._load_weights(resume_from_checkpoint)
        return super().train(resume_from_checkpoint=resume_from_checkpoint, **kwargs)  # type: ignore[misc]

    def _load_from_checkpoint(self: Any, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        if not self.is_fsdp_enabled:
            self._load_weights(resume_from_checkpoint, model)

    def _load_weights(self: Any, checkpoint: str, model: nn.Module | None = None) -> None:
        shards = read_shards(Path(checkpoint))  # refuses a checkpoint where transformers would read a pickle
        if not self.has_adapters:
            super()._load_from_checkpoint(checkpoint, model)  # type: ignore[misc]
            return
        # The files have the adapters merged into the base weights, which never change and are in the model already.
        target = self.model if model is None else model
        weights = {name: weight for shard in shards for name, weight in load_file(shard.path).items()}
        weights = {name: weights[name] for name in target.state_dict() if name in weights}
        target.load_state_dict({**weights, **read_state(Path(checkpoint) / ADAPTERS_FILE)}, strict=False)

    def _load_best_model(self: Any) -> None:
        if self.has_adapters and not self.is_fsdp_enabled:
            self._load_weights(self.state.best_model_checkpoint)
        else:
            super()._load_best_model()  # type: ignore[misc]

    def _save_optimizer_and_scheduler(self: Any, output_dir: str) -> None:
        if self.is_deepspeed_enabled:  # it has its own files
            super()._save_optimizer_and_scheduler(output_dir)  # type: ignore[misc]
            return
        sharded = self.is_fsdp_enabled
        state = gather_optimizer_state(self.model, self.optimizer) if sharded else self.optimizer.state_dict()
        if self.args.should_save:
            write_state(state, Path(output_dir) / OPTIMIZER_FILE)
            write_state(self.lr_scheduler.state_dict(), Path(output_dir) / SCHEDULER_FILE)

    def _load_optimizer_and_scheduler(self: Any, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        if self.is_deepspeed_enabled:
            super()._load_optimizer_and_scheduler(checkpoint)  # type: ignore[misc]
            return
        if not (Path(checkpoint) / OPTIMIZER_FILE).is_file():
            raise PosEncError(
                f"{checkpoint} has no optimizer state (--save-only-model), so the run cannot resume: start over with "
                "--restart"
            )
        state = read_state(Path(checkpoint) / OPTIMIZER_FILE)
        was_sharded = any(isinstance(key, str) for key in state["state"])
        if was_sharded != self.is_fsdp_enabled:
            raise PosEncError(f"Resume {checkpoint} {'with' if was_sharded else 'without'} FSDP, as it was started")
        if was_sharded:
            scatter_optimizer_state(self.model, self.optimizer, state)
        else:
            self.optimizer.load_state_dict(state)
        self.lr_scheduler.load_state_dict(read_state(Path(checkpoint) / SCHEDULER_FILE))

    def _save_scaler(self: Any, output_dir: str) -> None:
        scaler = getattr(self.accelerator, "scaler", None)
        if scaler is not None and self.args.should_save:
            write_state(scaler.state_dict(), Path(output_dir) / SCALER_FILE)

    def _load_scaler(self: Any, checkpoint: str | None) -> None:
        scaler = getattr(self.accelerator, "scaler", None)
        if checkpoint is not None and scaler is not None and (Path(checkpoint) / SCALER_FILE).is_file():
            scaler.load_state_dict(read_state(Path(checkpoint) / SCALER_FILE))

    def _save_rng_state(self: Any, output_dir: str) -> None:
        Path(output_dir).mkdir(parents=True, exist_ok=True)
        write_state(get_rng_state(), self._rng_file(output_dir))

    def _load_rng_state(self: Any, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        path = self._rng_file(checkpoint)
        if not path.is_file():
            logger.warning(f"{checkpoint} is from a run with fewer processes: not restoring the random state")
            return
        set_rng_state(read_state(path))

    def _rng_file(self: Any, directory: str) -> Path:
        return Path(directory) / f"rng_state_{self.args.process_index}.safetensors"

    def check_finite_weights(self: Any) -> None:
        """Raise `NonFiniteError` if a weight is infinite or NaN; called before anything is saved."""
        for name, parameter in self.model.named_parameters():
            local = parameter.to_local() if hasattr(parameter, "to_local") else parameter  # this process's shard
            if not torch.isfinite(local.detach()).all():
                raise NonFiniteError(name, self.state.global_step, list_checkpoints(Path(self.args.output_dir)))


def rotate_checkpoints(newest: Path, limit: int | None, best: str | None) -> None:
    """Delete all but the newest checkpoints and the best one, as `save_total_limit` says.

    Checkpoints of later steps are damaged ones that the run went back from: they do not count, and stay.
    """
    if not limit or limit < 1:
        return
    earlier = [path for path in list_checkpoints(newest.parent) if checkpoint_step(path) <= checkpoint_step(newest)]
    candidates = [path for path in earlier if best is None or path != Path(best)]
    staging = newest.parent / STAGING_DIRECTORY
    for checkpoint in candidates[max(limit - (best is not None), 1) :]:
        staging.mkdir(exist_ok=True)
        checkpoint.rename(staging / checkpoint.name)  # so that a half-deleted one does not count as a checkpoint
    shutil.rmtree(staging, ignore_errors=True)


@contextmanager
def translate_disk_full(directory: Path) -> Iterator[None]:
    """Turn any error that means a full disk into `DiskFullError`."""
    try:
        yield
    except Exception as error:
        if not is_out_of_space(error) or isinstance(error, DiskFullError):
            raise
        raise DiskFullError(directory, list_checkpoints(directory)) from error


class DiskFullError(PosEncError):
    """The disk is full."""

    def __init__(self, directory: Path, checkpoints: list[Path]) -> None:
        last = f"the last checkpoint is {checkpoints[0]}" if checkpoints else "there is no checkpoint yet"
        super().__init__(
            f"No space left on the disk of {directory}. Partial files were removed; {last}. Free some space, or keep "
            "fewer checkpoints with --save-total-limit 1, and rerun the same command to resume"
        )


class NonFiniteError(PosEncError):
    """The loss or a weight is infinite or NaN."""

    def __init__(self, name: str, step: int, checkpoints: list[Path]) -> None:
        last = f"the last checkpoint is {checkpoints[0]}" if checkpoints else "there is no checkpoint yet"
        super().__init__(
            f"Non-finite {name} at step {step}: training diverged. Nothing was saved since; {last}. Lower "
            "--learning-rate or --max-grad-norm, raise --warmup-steps, or use bf16 instead of fp16, and start over "
            "with --restart"
        )
