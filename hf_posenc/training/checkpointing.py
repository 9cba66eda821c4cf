"""A Trainer whose checkpoints are atomic, verified by checksums and free of pickles.

A checkpoint is written to a staging directory, listed in a manifest, and then renamed: whenever a run is killed, every
`checkpoint-N` is complete.

`Trainer` has no public hooks for how checkpoints are written and read. This module is the only one that overrides its
private methods.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint import state_dict as sharded
from transformers import Trainer, TrainerCallback, TrainerState
from transformers.trainer_utils import TrainOutput
from transformers.utils import logging

from ..checkpoints import (
    Companions,
    checkpoint_step,
    fsync,
    is_out_of_space,
    list_checkpoints,
    read_shards,
    verify_manifest,
    write_manifest,
)
from ..errors import PosEncError
from .optimizer import merge_adapters
from .sharding import local_shard
from .state_files import get_rng_state, read_state, set_rng_state, write_state

logger = logging.get_logger(__name__)
STAGING_DIRECTORY = ".unfinished"
OPTIMIZER_FILE, SCHEDULER_FILE, SCALER_FILE = "optimizer.safetensors", "scheduler.safetensors", "scaler.safetensors"
TRAINABLE_FILE = "trainable.safetensors"
"""The trainable parameters of a model with adapters, which are merged into the weights in the model's own file."""
GATHERED = sharded.StateDictOptions(full_state_dict=True, cpu_offload=True)
"""Gather the state of a model that FSDP2 has sharded; all processes must do so."""


class _TrainingComplete(Exception):
    """There is nothing left to train."""


class _CompletionCheck(TrainerCallback):
    """Stops a run that resumes from its last checkpoint, where `Trainer` would run one more step."""

    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        if state.global_step >= state.max_steps:
            raise _TrainingComplete


class CheckpointingTrainer(Trainer):
    """transformers' `Trainer` with atomic checkpoints, for models with or without LoRA adapters."""

    has_adapters = False
    companions: Companions | None = None
    """Files of the original checkpoint that `Trainer` does not save, such as the modules of sentence-transformers."""
    is_fsdp_enabled: bool
    _staging: Path | None = None

    def _save_checkpoint(self, model: nn.Module, trial: object) -> None:
        self.check_finite_weights()
        output_dir = Path(super()._get_output_dir(trial))
        checkpoint = output_dir / f"checkpoint-{self.state.global_step}"
        self._staging = output_dir / STAGING_DIRECTORY
        try:
            super()._save_checkpoint(model, trial)
            self.accelerator.wait_for_everyone()
            if self.args.should_save:
                self._publish(self._staging / checkpoint.name, checkpoint)
        except BaseException:
            shutil.rmtree(self._staging, ignore_errors=True)
            raise
        finally:
            self._staging = None
        self.accelerator.wait_for_everyone()

    def _publish(self, staged: Path, checkpoint: Path) -> None:
        if self.state.best_global_step:  # names the staging directory so far
            best = checkpoint.with_name(f"checkpoint-{self.state.best_global_step}")
            self.state.best_model_checkpoint = str(best)
            self.state.save_to_json(str(staged / "trainer_state.json"))
        if self.companions is not None:
            self.companions.copy_to(staged, replace=False)
        write_manifest(staged)
        if checkpoint.exists():
            shutil.rmtree(checkpoint)
        staged.rename(checkpoint)
        staged.parent.rmdir()
        fsync(checkpoint.parent)
        rotate_checkpoints(checkpoint, self.args.save_total_limit, self.state.best_model_checkpoint)

    def _get_output_dir(self, trial: object) -> str:
        return str(self._staging) if self._staging else super()._get_output_dir(trial)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        if not self.is_fsdp_enabled:
            super().save_model(output_dir, _internal_call)
            return
        weights = sharded.get_model_state_dict(self.model, options=GATHERED)
        if self.args.should_save:
            self._save(output_dir, weights)

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        if not self.args.should_save:  # newer versions of transformers call it in every process
            super()._save(output_dir, state_dict)
            return
        directory = Path(output_dir or self.args.output_dir)
        if self.has_adapters:
            weights = self.model.state_dict() if state_dict is None else state_dict
            if self._staging:  # a checkpoint to resume from, not the final model
                directory.mkdir(parents=True, exist_ok=True)
                trainable = [name for name, parameter in self.model.named_parameters() if parameter.requires_grad]
                write_state({name: weights[name] for name in trainable}, directory / TRAINABLE_FILE)
            state_dict = merge_adapters(self.model, weights)
        if state_dict is not None:  # gathered from shards: tied weights are no longer the same tensor
            tied = getattr(self.model, "all_tied_weights_keys", None) or {}
            state_dict = {name: weight for name, weight in state_dict.items() if tied.get(name) not in state_dict}
        super()._save(output_dir, state_dict)
        (directory / "training_args.bin").unlink(missing_ok=True)  # a pickle
        arguments = json.dumps(self.args.to_sanitized_dict(), indent=1, default=str)
        (directory / "training_args.json").write_text(arguments, encoding="utf-8")

    def train(self, resume_from_checkpoint: str | None = None, **kwargs: Any) -> TrainOutput:
        if resume_from_checkpoint and self.is_fsdp_enabled:  # before the weights are sharded
            self._load_weights(resume_from_checkpoint)
        self.add_callback(_CompletionCheck)
        try:
            return super().train(resume_from_checkpoint=resume_from_checkpoint, **kwargs)
        except _TrainingComplete:
            output = self._finalize_training(None, 0, time.time())
            return TrainOutput(output.global_step, _mean_loss(self.state), output.metrics)
        finally:
            self.remove_callback(_CompletionCheck)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        if not self.is_fsdp_enabled:
            self._load_weights(resume_from_checkpoint, model)

    def _load_weights(self, checkpoint: str, model: nn.Module | None = None) -> None:
        read_shards(Path(checkpoint))  # refuses a checkpoint where transformers would read a pickle
        if self.has_adapters:  # all other weights never change and are in the model already
            target = self.model if model is None else model
            target.load_state_dict(read_state(Path(checkpoint) / TRAINABLE_FILE), strict=False)
            return
        is_fsdp_enabled, self.is_fsdp_enabled = self.is_fsdp_enabled, False  # the weights and their file are whole
        try:
            super()._load_from_checkpoint(checkpoint, model)
        finally:
            self.is_fsdp_enabled = is_fsdp_enabled

    def _load_best_model(self) -> None:
        if self.has_adapters:
            self._load_weights(self.state.best_model_checkpoint)
        else:
            super()._load_best_model()

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if self.is_deepspeed_enabled:  # it has its own files
            super()._save_optimizer_and_scheduler(output_dir)
            return
        if self.is_fsdp_enabled:
            state = sharded.get_optimizer_state_dict(self.model, self.optimizer.optimizer, options=GATHERED)
        else:
            state = self.optimizer.state_dict()
        if self.args.should_save:
            write_state(state, Path(output_dir) / OPTIMIZER_FILE)
            write_state(self.lr_scheduler.state_dict(), Path(output_dir) / SCHEDULER_FILE)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        if self.is_deepspeed_enabled:
            super()._load_optimizer_and_scheduler(checkpoint)
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
            options = sharded.StateDictOptions(full_state_dict=True)
            sharded.set_optimizer_state_dict(self.model, self.optimizer.optimizer, state, options=options)
        else:
            self.optimizer.load_state_dict(state)
        self.lr_scheduler.load_state_dict(read_state(Path(checkpoint) / SCHEDULER_FILE))

    def _save_scaler(self, output_dir: str) -> None:
        scaler = getattr(self.accelerator, "scaler", None)
        if scaler is not None and self.args.should_save:
            write_state(scaler.state_dict(), Path(output_dir) / SCALER_FILE)

    def _load_scaler(self, checkpoint: str | None) -> None:
        scaler = getattr(self.accelerator, "scaler", None)
        if checkpoint is not None and scaler is not None and (Path(checkpoint) / SCALER_FILE).is_file():
            scaler.load_state_dict(read_state(Path(checkpoint) / SCALER_FILE))

    def _save_rng_state(self, output_dir: str) -> None:
        Path(output_dir).mkdir(parents=True, exist_ok=True)
        write_state(get_rng_state(), self._rng_file(output_dir))

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        if self._rng_file(checkpoint).is_file():
            set_rng_state(read_state(self._rng_file(checkpoint)))
        else:
            logger.warning(f"{checkpoint} is from a run with fewer processes: not restoring the random state")

    def _rng_file(self, directory: str) -> Path:
        return Path(directory) / f"rng_state_{self.args.process_index}.safetensors"

    def check_finite_weights(self) -> None:
        """Raise PosEncError if a weight is infinite or NaN; called before anything is saved."""
        for name, parameter in self.model.named_parameters():
            if not torch.isfinite(local_shard(parameter)).all():
                raise self.divergence_error(name)

    def divergence_error(self, name: str) -> PosEncError:
        """The error for a loss or weight that is infinite or NaN."""
        return PosEncError(
            f"Non-finite {name} at step {self.state.global_step}: training diverged. Nothing was saved since; "
            f"{_describe_last_checkpoint(Path(self.args.output_dir))}. Lower --learning-rate or --max-grad-norm, raise "
            "--warmup-steps, or use bf16 instead of fp16, and start over with --restart"
        )


def _mean_loss(state: TrainerState) -> float:
    """The mean of the losses that were logged, each of which is a mean over the steps since the one before."""
    total, last_step = 0.0, 0
    for logs in state.log_history:
        if "loss" in logs:
            total += logs["loss"] * (logs["step"] - last_step)
            last_step = logs["step"]
    return total / max(last_step, 1)


def last_valid_checkpoint(directory: Path) -> Path | None:
    """The newest checkpoint that matches its manifest; logs a warning for each that does not."""
    for checkpoint in list_checkpoints(directory):
        problem = verify_manifest(checkpoint)
        if problem is None:
            return checkpoint
        logger.warning(f"Skipping the damaged checkpoint {checkpoint}: {problem}")
    return None


def rotate_checkpoints(newest: Path, limit: int | None, best: str | None) -> None:
    """Delete all but the newest checkpoints and the best one, as `save_total_limit` says."""
    if not limit or limit < 1:
        return
    # Checkpoints of later steps are damaged ones that the run went back from: they do not count, and stay.
    earlier = [path for path in list_checkpoints(newest.parent) if checkpoint_step(path) <= checkpoint_step(newest)]
    candidates = [path for path in earlier if best is None or path != Path(best)]
    staging = newest.parent / STAGING_DIRECTORY
    for checkpoint in candidates[max(limit - (best is not None), 1) :]:
        staging.mkdir(exist_ok=True)
        checkpoint.rename(staging / checkpoint.name)  # so that a half-deleted one does not count as a checkpoint
    shutil.rmtree(staging, ignore_errors=True)


@contextmanager
def translate_disk_full(directory: Path) -> Iterator[None]:
    """Raise any error that means a full disk as PosEncError, with advice."""
    try:
        yield
    except Exception as error:
        if not is_out_of_space(error):
            raise
        raise PosEncError(
            f"No space left on the disk of {directory}. Partial files were removed; "
            f"{_describe_last_checkpoint(directory)}. Free some space, or keep fewer checkpoints with "
            "--save-total-limit 1, and rerun the same command to resume"
        ) from error


def _describe_last_checkpoint(directory: Path) -> str:
    checkpoints = list_checkpoints(directory)
    return f"the last checkpoint is {checkpoints[0]}" if checkpoints else "there is no checkpoint yet"
