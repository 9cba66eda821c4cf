"""The processes that share an evaluation: one, or as many as `accelerate launch` has started."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch

from .halt import Halt

Item = TypeVar("Item")


@dataclasses.dataclass(frozen=True)
class Crew:
    """This process among the others. Work is dealt out by number, and what came of it is put together in all."""

    index: int
    size: int
    device: torch.device
    progress: bool = True

    @classmethod
    def gathered(cls, device: str | None = None, progress: bool = True) -> Crew:
        """Join the other processes, where there are some."""
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            try:
                from accelerate import PartialState
                from accelerate.utils import parse_flag_from_env
            except ImportError:
                raise ValueError("several processes take accelerate: pip install hf_posenc[train]") from None
            if device is not None:
                raise ValueError("with several processes, accelerate deals out the devices: leave out the device")
            on_cpu = parse_flag_from_env("ACCELERATE_USE_CPU") or not torch.accelerator.is_available()
            state = PartialState(cpu=on_cpu)  # left to itself, it does not join processes where there is no GPU
            if state.num_processes == 1:
                raise ValueError(
                    f"there are {os.environ['WORLD_SIZE']} processes, and accelerate did not join them: each would "
                    "measure everything"
                )
            return cls(state.process_index, state.num_processes, state.device, progress and state.is_main_process)
        found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        return cls(0, 1, _device(device) if device else found or torch.device("cpu"), progress)

    @property
    def leads(self) -> bool:
        return self.index == 0

    def tell(self, value: Item) -> Item:
        """What the first process has, for all."""
        if self.size == 1:
            return value
        held = [value]
        torch.distributed.broadcast_object_list(held, 0)
        return held[0]

    def batches(self, count: int, at_once: int, saying: str) -> Iterator[list[int]]:
        """The numbers of this process's part of the work, some at a time, with a bar that shows how far it is."""
        from tqdm.auto import tqdm

        mine = list(range(self.index, count, self.size))
        with tqdm(total=len(mine), desc=saying, unit="window", leave=False, disable=not self.progress) as bar:
            for start in range(0, len(mine), at_once):
                numbers = mine[start : start + at_once]
                yield numbers
                bar.update(len(numbers))

    def collect(self, work: Callable[[], list[tuple[int, Any]]]) -> list[Any]:
        """Everybody's results, in the order of their numbers. Where one process had to halt, all do."""
        halt, done = None, []
        try:
            done = work()
        except Halt as found:
            halt = found
        if self.size > 1:
            parts: list[Any] = [None] * self.size
            torch.distributed.all_gather_object(parts, (halt, done))
            halt = next((found for found, _ in parts if found is not None), None)
            done = [item for _, items in parts for item in items]
        if halt is not None:
            raise halt
        return [result for _, result in sorted(done, key=lambda item: item[0])]


def _device(name: str) -> torch.device:
    """By its name, and there: torch says what is wrong with others in many ways."""
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"the device {name!r} cannot be used here: {error}") from error
    return device
