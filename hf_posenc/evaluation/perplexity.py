"""Perplexity of windows of one length, in whole and by the place inside of the window."""

from __future__ import annotations

import dataclasses

import torch

from .crew import Crew
from .estimates import mean, perplexity
from .masked import MaskedText
from .results import LengthResult, PositionResult
from .scoring import losses, rows_at_once
from .settings import Settings
from .subject import Subject
from .text import digest
from .windows import Windows, cut


@dataclasses.dataclass(frozen=True)
class Losses:
    """Sums of nats and numbers of tokens, by window and part of the window: (W, P)."""

    sums_WP: torch.Tensor
    counts_WP: torch.Tensor


def measure_length(subject: Subject, length: int, settings: Settings, crew: Crew) -> LengthResult:
    if settings.stride is not None and not subject.causal:
        raise ValueError("a sliding window is for causal models: a masked one sees both sides, leave out the stride")
    windows = cut(subject.stream, subject.frame, length, settings.stride)
    edges = part_edges(length, settings.bins)
    found = window_losses(subject, windows, edges, settings, crew)
    return summary(subject.name, windows, edges, found, settings.confidence)


def part_edges(length: int, bins: int) -> list[int]:
    """Where the parts of a window begin, and the end of the last."""
    number = max(min(bins, length), 1)
    return [length * part // number for part in range(number + 1)]


def window_losses(subject: Subject, windows: Windows, edges: list[int], settings: Settings, crew: Crew) -> Losses:
    saying = f"{subject.name}, {windows.length} tokens"
    at_once = rows_at_once(settings.batch_tokens, windows.length)
    parts = torch.bucketize(torch.arange(windows.length), torch.tensor(edges[1:]), right=True)
    masked = None if subject.causal else MaskedText.of(subject, windows, settings.mask_share, settings.seed)

    def work() -> list[tuple[int, tuple[list[float], list[int]]]]:
        done = []
        for numbers in crew.batches(len(windows), at_once, saying):
            targets_BN = windows.rows(numbers)
            if masked is None:
                ids_BN, wanted_BN = targets_BN, new_tokens(windows, numbers)
            else:
                ids_BN, wanted_BN = masked.hide(targets_BN, numbers)
            device = subject.device
            losses_BN = losses(
                subject.model, ids_BN.to(device), targets_BN.to(device), wanted_BN.to(device), subject.causal
            )
            for number, row_N, seen_N in zip(numbers, losses_BN, wanted_BN, strict=True):
                sums_P = torch.zeros(len(edges) - 1, dtype=torch.float64).index_add_(0, parts, row_N)
                counts_P = torch.zeros(len(edges) - 1, dtype=torch.long).index_add_(0, parts, seen_N.long())
                done.append((number, (sums_P.tolist(), counts_P.tolist())))
        return done

    collected = crew.collect(work)
    sums, counts = zip(*collected, strict=True)
    return Losses(torch.tensor(sums, dtype=torch.float64), torch.tensor(counts))


def new_tokens(windows: Windows, numbers: list[int]) -> torch.Tensor:
    """What a causal model is asked: tokens that no earlier window had, but for a first that nothing leads to."""
    places_N = torch.arange(windows.length)
    first_B1 = torch.tensor([max(windows.new_from[number], 1) for number in numbers])[:, None]
    return places_N >= first_B1


def summary(name: str, windows: Windows, edges: list[int], found: Losses, confidence: float) -> LengthResult:
    units = windows.units
    pieces = int(units.max()) + 1
    sums_UP = torch.zeros(pieces, found.sums_WP.shape[1], dtype=torch.float64).index_add_(0, units, found.sums_WP)
    counts_UP = torch.zeros(pieces, found.counts_WP.shape[1], dtype=torch.long).index_add_(0, units, found.counts_WP)
    sums_U, counts_U = sums_UP.sum(1), counts_UP.sum(1)
    positions = tuple(
        PositionResult(start, end, perplexity(mean(sums, counts, confidence)), int(counts.sum()))
        for start, end, sums, counts in zip(edges, edges[1:], sums_UP.T, counts_UP.T, strict=False)
        if counts.sum()
    )
    return LengthResult(
        model=name,
        length=windows.length,
        perplexity=perplexity(mean(sums_U, counts_U, confidence)),
        tokens=int(counts_U.sum()),
        windows=len(windows),
        positions=positions,
        losses=tuple(sums_U.tolist()),
        counts=tuple(counts_U.tolist()),
        text=digest(windows.stream),
    )
