"""Split an evaluation across the processes of `accelerate launch`."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterable
from typing import TypeVar

import torch
from tqdm.auto import tqdm

from ..errors import PosEncError
from .results import EvaluationStopped

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class ProcessGroup:
    """This process among those that share the evaluation; without `accelerate launch`, the only one."""

    device: torch.device
    rank: int = 0
    world_size: int = 1
    progress: bool = True

    @classmethod
    def initialize(cls, device: str | None = None, progress: bool = True) -> ProcessGroup:
        """Join the other processes, if there are any, and choose the device."""
        world_size = int(os.environ.get("WORLD_SIZE", "1"))
        if world_size == 1:
            return cls(_select_device(device), progress=progress)
        if device is not None:
            raise PosEncError("accelerate assigns the devices when there are several processes: remove the device")
        try:
            from accelerate import PartialState
            from accelerate.utils import parse_flag_from_env
        except ImportError:
            raise PosEncError("Several processes require accelerate: pip install hf_posenc[train]") from None
        # Without a GPU, PartialState only joins the processes when told to use the CPU.
        state = PartialState(cpu=parse_flag_from_env("ACCELERATE_USE_CPU") or not torch.accelerator.is_available())
        if state.num_processes == 1:
            raise PosEncError(f"accelerate did not connect the {world_size} processes: each would evaluate everything")
        return cls(state.device, state.process_index, state.num_processes, progress and state.is_main_process)

    @property
    def is_main_process(self) -> bool:
        return self.rank == 0

    def broadcast(self, value: T) -> T:
        """The main process's value, in every process."""
        values = [value]
        if self.world_size > 1:
            torch.distributed.broadcast_object_list(values, 0)
        return values[0]

    def map_batches(
        self, compute: Callable[[list[int]], Iterable[T]], num_items: int, batch_size: int, description: str
    ) -> list[T]:
        """One result per item in every process, computed in batches of item indices that the processes share.

        If any process stops, all of them raise EvaluationStopped.
        """
        stopped: EvaluationStopped | None = None
        results: list[tuple[int, T]] = []
        indices = range(self.rank, num_items, self.world_size)
        try:
            with tqdm(total=len(indices), desc=description, leave=False, disable=not self.progress) as bar:
                for start in range(0, len(indices), batch_size):
                    batch = list(indices[start : start + batch_size])
                    results += zip(batch, compute(batch), strict=True)
                    bar.update(len(batch))
        except EvaluationStopped as error:
            stopped = error
        if self.world_size > 1:
            gathered: list[tuple[EvaluationStopped | None, list[tuple[int, T]]]] = [(None, [])] * self.world_size
            torch.distributed.all_gather_object(gathered, (stopped, results))
            stopped = next((error for error, _ in gathered if error is not None), None)
            results = [item for _, items in gathered for item in items]
        if stopped is not None:
            raise stopped
        return [result for _, result in sorted(results, key=lambda item: item[0])]


def _select_device(name: str | None) -> torch.device:
    if name is None:
        accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        return accelerator or torch.device("cpu")
    try:
        return torch.empty(1, device=name).device
    except (RuntimeError, AssertionError) as error:  # torch raises either for devices it was not built for
        raise PosEncError(f"Cannot use device {name!r}: {error}") from error
