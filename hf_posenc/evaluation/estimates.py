"""Means over pieces of text with their confidence intervals."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from statistics import NormalDist

import torch


@dataclasses.dataclass(frozen=True)
class Estimate:
    """A value and the interval that holds the true one with the confidence that was asked for.

    The interval is None where a single piece of text says nothing of how much pieces differ.
    """

    value: float
    low: float | None = None
    high: float | None = None

    def through(self, rising: Callable[[float], float]) -> Estimate:
        """What a rising function makes of the value and of both ends."""
        ends = (None if end is None else rising(end) for end in (self.low, self.high))
        return Estimate(rising(self.value), *ends)

    def within(self, lowest: float, highest: float) -> Estimate:
        """With an interval that ends where the values that there are do."""
        return self.through(lambda value: min(max(value, lowest), highest))


def perplexity(loss: Estimate) -> Estimate:
    """Of a loss in nats. No more than a float holds: JSON has no word for infinity."""
    return loss.through(lambda nats: math.exp(min(nats, 700.0)))


def mean(sums: torch.Tensor, counts: torch.Tensor, confidence: float) -> Estimate:
    """The sum over all pieces by their count, where pieces (not tokens, which hang together) are independent.

    The error of a ratio of two sums to first order, with Student's quantiles: there may be few pieces.
    """
    sums, counts = sums.double(), counts.double()
    used = counts > 0
    sums, counts = sums[used], counts[used]
    pieces, total = len(counts), counts.sum().item()
    if not pieces:
        raise ValueError("there is nothing to take the mean of")
    value = sums.sum().item() / total
    if pieces == 1:
        return Estimate(value)
    off = sums - value * counts
    error = math.sqrt(pieces / (pieces - 1) * off.square().sum().item()) / total
    reach = student_quantile(0.5 + confidence / 2, pieces - 1) * error
    return Estimate(value, value - reach, value + reach)


def share(hits: float, tries: int, confidence: float) -> Estimate:
    """A share of successes, with Wilson's interval: it is right also where all or none succeeded."""
    z = NormalDist().inv_cdf(0.5 + confidence / 2)
    found = hits / tries
    middle = (found + z * z / (2 * tries)) / (1 + z * z / tries)
    reach = z / (1 + z * z / tries) * math.sqrt(found * (1 - found) / tries + z * z / (4 * tries * tries))
    return Estimate(found, middle - reach if hits else 0.0, middle + reach if hits < tries else 1.0)


def student_quantile(probability: float, freedom: int) -> float:
    """Of Student's t: exact for one and two degrees of freedom, else found on its distribution by halving."""
    if freedom == 1:
        return math.tan(math.pi * (probability - 0.5))
    if freedom == 2:
        return (2 * probability - 1) / math.sqrt(2 * probability * (1 - probability))
    low, high = 0.0, 2 * student_quantile(probability, 2)
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _student_below(middle, freedom) < probability else (low, middle)
    return (low + high) / 2


def _student_below(t: float, freedom: int) -> float:
    """The probability of less than t, from the finite series for whole degrees of freedom."""
    angle = math.atan(t / math.sqrt(freedom))
    cosine, sine = math.cos(angle), math.sin(angle)
    odd = freedom % 2
    term = cosine if odd else 1.0
    total = term if freedom > 1 else 0.0
    for step in range(2 + odd, freedom - 1, 2):
        term *= cosine * cosine * (step - 1) / step
        total += term
    inside = 2 / math.pi * (angle + sine * total) if odd else sine * total
    return 0.5 + inside / 2
