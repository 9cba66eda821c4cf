"""Does the order of the context matter to a model? Tokens are predicted from the same context, in order and shuffled.

What is predicted stays where it is; only what it is predicted from is shuffled, in blocks or in whole. A causal model
is asked for the token behind each block; a masked one for tokens that are hidden.
"""

from __future__ import annotations

import random

import torch

from .crew import Crew
from .estimates import mean
from .halt import Halt
from .masked import MaskedText
from .results import OrderResult, ShuffleResult
from .scoring import losses, rows_at_once
from .settings import Settings
from .subject import Subject
from .windows import Windows, cut


def measure_order(subject: Subject, length: int, settings: Settings, crew: Crew) -> OrderResult:
    windows = cut(subject.stream, subject.frame, length)
    if windows.body < 3:
        raise Halt(f"a window of {length} tokens has no order to lose")
    shuffles = tuple(_shuffled(subject, windows, block, settings, crew) for block in settings.blocks)
    return OrderResult(subject.name, length, shuffles=shuffles)


def _shuffled(subject: Subject, windows: Windows, block: int | None, settings: Settings, crew: Crew) -> ShuffleResult:
    text_N = windows.text_places()
    masked = None if subject.causal else MaskedText.of(subject, windows, settings.mask_share, settings.seed)
    size = windows.body if block is None else min(block + (1 if subject.causal else 0), windows.body)
    saying = f"{subject.name}, order in {'whole' if block is None else block}"
    device = subject.device

    def work() -> list[tuple[int, tuple[float, float, int]]]:
        done: list[tuple[int, tuple[float, float, int]]] = []
        for numbers in crew.batches(len(windows), rows_at_once(settings.batch_tokens, windows.length), saying):
            rows_BN = windows.rows(numbers)
            if masked is None:
                ids_BN, wanted_BN = rows_BN, block_ends(text_N, size).expand_as(rows_BN)
            else:
                ids_BN, wanted_BN = masked.hide(rows_BN, numbers)
            orders_BN = torch.stack(
                [
                    shuffled_places(text_N, wanted_N, size, f"{settings.seed} {block} {number}")
                    for number, wanted_N in zip(numbers, wanted_BN, strict=True)
                ]
            )
            asked = (rows_BN.to(device), wanted_BN.to(device), subject.causal)
            in_order = losses(subject.model, ids_BN.to(device), *asked).sum(1)
            mixed = losses(subject.model, ids_BN.gather(1, orders_BN).to(device), *asked).sum(1)
            counts = wanted_BN.sum(1)
            done += zip(numbers, zip(in_order.tolist(), mixed.tolist(), counts.tolist(), strict=True), strict=True)
        return done

    found = torch.tensor(crew.collect(work), dtype=torch.float64)
    in_order_W, mixed_W, counts_W = found.T
    return ShuffleResult(
        block,
        mean(in_order_W, counts_W, settings.confidence),
        mean(mixed_W - in_order_W, counts_W, settings.confidence),
        int(counts_W.sum()),
    )


def block_ends(text_N: torch.Tensor, size: int) -> torch.Tensor:
    """The last token of each whole block of text, (N,): what a causal model is asked for."""
    places = text_N.nonzero()[:, 0]
    ends = torch.zeros_like(text_N)
    ends[places[size - 1 :: size]] = True
    return ends


def shuffled_places(text_N: torch.Tensor, kept_N: torch.Tensor, size: int, seed: str) -> torch.Tensor:
    """For each place, the one whose token it gets: within its block of text, and never one that is kept. (N,)"""
    dice = random.Random(seed)
    order = torch.arange(len(text_N))
    for block in text_N.nonzero()[:, 0].split(size):
        free = block[~kept_N[block]].tolist()
        order[free] = torch.tensor(dice.sample(free, len(free)), dtype=torch.long)
    return order
