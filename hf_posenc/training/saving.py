"""Checkpoints of a Trainer that are whole or not there, without pickles.

A checkpoint is written beside its place, listed with checksums, and then renamed: whenever a run is killed, what is
called `checkpoint-N` is complete.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import nn
from transformers.trainer_callback import TrainerState
from transformers.utils import logging

from ..checkpoints.disk import fsync, is_out_of_space
from ..checkpoints.manifest import verify_manifest, write_manifest
from ..checkpoints.shards import read_shards
from .lora import is_of_adapter, merged
from .sharded import gathered_optimizer, gathered_weights, is_finite_everywhere, share_out_optimizer
from .state_files import random_state, read_state, set_random_state, write_state

logger = logging.get_logger(__name__)
UNFINISHED = ".unfinished"
"""Where things are written before they take their place."""
OPTIMIZER, SCHEDULER, STATE = "optimizer.safetensors", "scheduler.safetensors", "trainer_state.json"
ADAPTERS, SCALER = "adapters.safetensors", "scaler.safetensors"
_CHECKPOINT = re.compile(r"checkpoint-(\d+)")


def checkpoints_in(directory: Path) -> list[Path]:
    """Newest first."""
    found = [path for path in directory.glob("checkpoint-*") if path.is_dir() and _CHECKPOINT.fullmatch(path.name)]
    return sorted(found, key=step_of, reverse=True)


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.rpartition("-")[2])


def last_whole_checkpoint(directory: Path) -> Path | None:
    """The newest one that is as it was written; a warning for each that is not."""
    for checkpoint in checkpoints_in(directory):
        problem = verify_manifest(checkpoint)
        if problem is None:
            return checkpoint
        logger.warning(f"{checkpoint} is damaged, and left out: {problem}. An earlier checkpoint is taken instead.")
    return None


class WholeCheckpoints:
    """For a Trainer to inherit before `Trainer`."""

    has_adapters = False
    _staging: str | None = None

    def _save_checkpoint(self: Any, model: nn.Module, trial: Any) -> None:
        self.refuse_unsound_weights()
        step = self.state.global_step
        directory = Path(super()._get_output_dir(trial))  # type: ignore[misc]
        place, staging = directory / f"checkpoint-{step}", directory / UNFINISHED
        self._staging = str(staging)
        try:
            super()._save_checkpoint(model, trial)  # type: ignore[misc]
            self.accelerator.wait_for_everyone()
            if self.args.should_save:
                self._put_in_place(staging / place.name, place)
        except BaseException:
            shutil.rmtree(staging, ignore_errors=True)
            raise
        finally:
            self._staging = None
        self.accelerator.wait_for_everyone()

    def _put_in_place(self: Any, written: Path, place: Path) -> None:
        directory = place.parent
        self._name_best_checkpoint(written, directory)
        write_manifest(written)
        if place.exists():
            shutil.rmtree(place)
        written.rename(place)
        written.parent.rmdir()
        fsync(directory)
        _drop_old(place, self.args.save_total_limit, self.state.best_model_checkpoint)

    def _get_output_dir(self: Any, trial: Any) -> str:
        return getattr(self, "_staging", None) or super()._get_output_dir(trial)  # type: ignore[misc]

    def _name_best_checkpoint(self: Any, written: Path, directory: Path) -> None:
        """By the place that it will have, not by the one where it was written."""
        if self.state.best_global_step:
            self.state.best_model_checkpoint = str(directory / f"checkpoint-{self.state.best_global_step}")
            self.state.save_to_json(str(written / STATE))

    def _save(self: Any, output_dir: str | None = None, state_dict: Any = None) -> None:
        if not self.args.should_save:  # newer versions of transformers ask every process, and one writes
            super()._save(output_dir, state_dict)  # type: ignore[misc]
            return
        directory = Path(output_dir or self.args.output_dir)
        if self.has_adapters:
            state = self.model.state_dict() if state_dict is None else state_dict
            adapters = {name: weight for name, weight in state.items() if is_of_adapter(name)}
            directory.mkdir(parents=True, exist_ok=True)
            if self._staging:  # of a checkpoint
                write_state(adapters, directory / ADAPTERS)
            state_dict = merged(self.model, state)
        super()._save(output_dir, state_dict)  # type: ignore[misc]
        (directory / "training_args.bin").unlink(missing_ok=True)  # a pickle
        settings = json.dumps(self.args.to_sanitized_dict(), indent=1, default=str)
        (directory / "training_args.json").write_text(settings, encoding="utf-8")

    def save_model(self: Any, output_dir: str | None = None, _internal_call: bool = False) -> None:
        if not self.is_fsdp_enabled:
            super().save_model(output_dir, _internal_call)  # type: ignore[misc]
            return
        weights = gathered_weights(self.model)
        if self.args.should_save:
            self._save(output_dir, weights)

    def _save_optimizer_and_scheduler(self: Any, output_dir: str) -> None:
        if self.is_deepspeed_enabled:  # which has files of its own
            super()._save_optimizer_and_scheduler(output_dir)  # type: ignore[misc]
            return
        sharded = self.is_fsdp_enabled
        state = gathered_optimizer(self.model, self.optimizer) if sharded else self.optimizer.state_dict()
        if self.args.should_save:
            write_state(state, Path(output_dir) / OPTIMIZER)
            write_state(self.lr_scheduler.state_dict(), Path(output_dir) / SCHEDULER)

    def _load_optimizer_and_scheduler(self: Any, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        if self.is_deepspeed_enabled:
            super()._load_optimizer_and_scheduler(checkpoint)  # type: ignore[misc]
            return
        if not (Path(checkpoint) / OPTIMIZER).is_file():
            raise ValueError(
                f"{checkpoint} holds weights alone (--save-only-model), so that a run cannot go on from it: begin anew "
                "with --restart"
            )
        state = read_state(Path(checkpoint) / OPTIMIZER)
        was_sharded = any(isinstance(key, str) for key in state["state"])
        if was_sharded != self.is_fsdp_enabled:
            raise ValueError(f"{checkpoint} is from a run {'with' if was_sharded else 'without'} FSDP: go on as it was")
        if was_sharded:
            share_out_optimizer(self.model, self.optimizer, state)
        else:
            self.optimizer.load_state_dict(state)
        self.lr_scheduler.load_state_dict(read_state(Path(checkpoint) / SCHEDULER))

    def train(self: Any, resume_from_checkpoint: Any = None, **kwargs: Any) -> Any:
        """Weights that will be sharded are loaded before they are."""
        if resume_from_checkpoint and self.is_fsdp_enabled:
            self._load_weights(resume_from_checkpoint)
        return super().train(resume_from_checkpoint=resume_from_checkpoint, **kwargs)  # type: ignore[misc]

    def _load_from_checkpoint(self: Any, resume_from_checkpoint: str, model: Any = None) -> None:
        if not self.is_fsdp_enabled:
            self._load_weights(resume_from_checkpoint, model)

    def _load_weights(self: Any, checkpoint: str, model: Any = None) -> None:
        shards = read_shards(Path(checkpoint))  # where there are none, transformers would read a pickle
        if not self.has_adapters:
            super()._load_from_checkpoint(checkpoint, model)  # type: ignore[misc]
            return
        # What the adapters are added to never changes, and is there; in the files, they are merged into it.
        whole = self.model if model is None else model
        found = {name: weight for shard in shards for name, weight in load_file(shard.path).items()}
        adapters = read_state(Path(checkpoint) / ADAPTERS)
        whole.load_state_dict(
            {**{name: found[name] for name in whole.state_dict() if name in found}, **adapters}, False
        )

    def _load_best_model(self: Any) -> None:
        if self.has_adapters and not self.is_fsdp_enabled:
            self._load_weights(self.state.best_model_checkpoint)
        else:
            super()._load_best_model()  # type: ignore[misc]

    def _save_scaler(self: Any, output_dir: str) -> None:
        """Of gradients, with fp16."""
        scaler = getattr(self.accelerator, "scaler", None)
        if scaler is not None and self.args.should_save:
            write_state(scaler.state_dict(), Path(output_dir) / SCALER)

    def _load_scaler(self: Any, checkpoint: str | None) -> None:
        scaler = getattr(self.accelerator, "scaler", None)
        if checkpoint is not None and scaler is not None and (Path(checkpoint) / SCALER).is_file():
            scaler.load_state_dict(read_state(Path(checkpoint) / SCALER))

    def _save_rng_state(self: Any, output_dir: str) -> None:
        Path(output_dir).mkdir(parents=True, exist_ok=True)
        write_state(random_state(), self._random_file(output_dir))

    def _load_rng_state(self: Any, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        path = self._random_file(checkpoint)
        if not path.is_file():
            logger.warning(f"{checkpoint} is from a run with fewer processes: what is drawn at random starts anew")
            return
        set_random_state(read_state(path))

    def _random_file(self: Any, directory: str) -> Path:
        return Path(directory) / f"rng_state_{self.args.process_index}.safetensors"

    def refuse_unsound_weights(self: Any) -> None:
        """Before anything is saved."""
        for name, parameter in self.model.named_parameters():
            if not is_finite_everywhere(parameter):
                raise NotFinite(name, self.state, checkpoints_in(Path(self.args.output_dir)))


@contextmanager
def told_when_full(directory: Path) -> Iterator[None]:
    """Whatever it is that finds no space any more, it is said in the same words."""
    try:
        yield
    except Exception as error:
        if not is_out_of_space(error) or isinstance(error, OutOfSpace):
            raise
        raise OutOfSpace(directory, checkpoints_in(directory)) from error


class OutOfSpace(ValueError):
    """The disk is full."""

    def __init__(self, directory: Path, checkpoints: list[Path]) -> None:
        kept = f"{checkpoints[0]} is whole" if checkpoints else "there is no checkpoint yet"
        super().__init__(
            f"there is no space left on the disk of {directory}. What was half written is gone, {kept}: make room, or "
            "keep fewer checkpoints with --save-total-limit 1, and give the same command again to go on"
        )


class NotFinite(ValueError):
    """The loss, or a weight, is infinite or not a number."""

    def __init__(self, what: str, state: TrainerState, checkpoints: list[Path]) -> None:
        kept = f"{checkpoints[0]} is still there and sound" if checkpoints else "there is no checkpoint yet"
        super().__init__(
            f"{what} is no finite number any more at step {state.global_step}: training went astray. Nothing of this "
            f"was saved ({kept}). Take a smaller --learning-rate or --max-grad-norm, more --warmup-steps, or bf16 "
            "rather than fp16, and begin again with --restart"
        )


def _drop_old(newest: Path, limit: int | None, best: str | None) -> None:
    """All but the newest ones and the best. Renamed first: what is half removed is no checkpoint.

    Those of later steps than the newest are damaged, and the run went back behind them: they do not count, and stay.
    """
    if not limit or limit < 1:
        return
    directory = newest.parent
    earlier = [path for path in checkpoints_in(directory) if step_of(path) <= step_of(newest)]
    kept = [path for path in earlier if best is None or path != Path(best)]
    for checkpoint in kept[max(limit - (best is not None), 1) :]:
        doomed = directory / UNFINISHED / checkpoint.name
        doomed.parent.mkdir(exist_ok=True)
        checkpoint.rename(doomed)
    shutil.rmtree(directory / UNFINISHED, ignore_errors=True)
