"""Rows of one length after another: short ones first, long ones later."""

from __future__ import annotations

import bisect
import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

import torch


@dataclasses.dataclass(frozen=True)
class Stage:
    """So many training steps on rows of a length; None: however long the run is."""

    length: int
    steps: int | None = None


def read_stages(text: str, max_steps: int) -> list[Stage]:
    """`1024`; `512,1024`, each for its share of all steps; or `512:300,1024:100`, with the steps of each."""
    stages = []
    for part in text.split(","):
        length, _, steps = part.partition(":")
        try:
            stages.append(Stage(int(length), int(steps) if steps else None))
        except ValueError:
            raise ValueError(f"--train-length is 1024, 512,1024 or 512:300,1024:100; {text!r} is not") from None
    if any(stage.length < 2 or (stage.steps is not None and stage.steps < 1) for stage in stages):
        raise ValueError(f"--train-length takes lengths of at least 2 tokens, and steps of at least 1; got {text!r}")
    given = [stage for stage in stages if stage.steps is not None]
    if len(stages) == 1 and not given:
        return stages
    if len(given) == len(stages):
        total = sum(stage.steps or 0 for stage in stages)
        if max_steps > 0 and total != max_steps:
            raise ValueError(f"--train-length has {total} steps in all, and --max-steps is {max_steps}: make them one")
        return stages
    if given or max_steps < len(stages):
        raise ValueError("several lengths need --max-steps to share out, or steps for each: 512:300,1024:100")
    share, rest = divmod(max_steps, len(stages))
    return [
        dataclasses.replace(stage, steps=share + (rest if number == len(stages) - 1 else 0))
        for number, stage in enumerate(stages)
    ]


class Staged(torch.utils.data.Dataset[Any]):
    """The rows that each stage sees, in the order in which it sees them: shuffled anew each time they have run out."""

    def __init__(self, datasets: list[Any], sizes: list[int], seed: int) -> None:
        self.datasets = datasets
        self.ends = list(itertools.accumulate(sizes))
        generator = torch.Generator().manual_seed(seed)
        self.order = [
            list(itertools.islice(_shuffled(len(rows), generator), size))
            for rows, size in zip(datasets, sizes, strict=True)
        ]

    def __len__(self) -> int:
        return self.ends[-1]

    def __getitem__(self, place: int) -> Any:
        stage = bisect.bisect_right(self.ends, place)
        start = self.ends[stage - 1] if stage else 0
        return self.datasets[stage][self.order[stage][place - start]]


def _shuffled(count: int, generator: torch.Generator) -> Iterator[int]:
    while True:
        yield from torch.randperm(count, generator=generator).tolist()
