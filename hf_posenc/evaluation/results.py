"""Evaluation results: one record per metric, model and length, with confidence intervals."""

from __future__ import annotations

import dataclasses
import functools
import math
import types
import typing
from collections.abc import Callable
from statistics import NormalDist
from typing import Any

import torch


@dataclasses.dataclass(eq=False)
class EvaluationStopped(Exception):
    """A model cannot be evaluated at some length, which is recorded as a result.

    `permanent`: another attempt would stop as well (not if out of memory). `refused`: the model rejects the length.
    """

    reason: str
    permanent: bool = True
    refused: bool = False


@dataclasses.dataclass(frozen=True)
class Estimate:
    """An estimated value and its confidence interval, which is None if there is too little text for one."""

    value: float
    confidence_interval: tuple[float, float] | None = None

    def map(self, increasing: Callable[[float], float]) -> Estimate:
        """Apply an increasing function to the value and both bounds."""
        if self.confidence_interval is None:
            return Estimate(increasing(self.value))
        low, high = self.confidence_interval
        return Estimate(increasing(self.value), (increasing(low), increasing(high)))

    def __str__(self) -> str:
        if self.confidence_interval is None:
            return f"{self.value:.4g}"
        low, high = self.confidence_interval
        return f"{self.value:.4g} ({low:.4g} to {high:.4g})"


def mean_estimate(sums: torch.Tensor, counts: torch.Tensor, confidence: float) -> Estimate:
    """The mean over all tokens, given sums and token counts per independent text segment.

    Tokens within a segment are correlated, so the interval is that of a ratio of two sums over segments (first-order
    error, Student's t because there may be few segments).
    """
    sums, counts = sums.double(), counts.double()
    used = counts > 0
    sums, counts = sums[used], counts[used]
    num_segments, total = len(counts), counts.sum().item()
    assert num_segments, "no segments to average"
    check_finite(sums)
    value = sums.sum().item() / total
    if num_segments == 1:
        return Estimate(value)
    residuals = sums - value * counts
    standard_error = math.sqrt(num_segments / (num_segments - 1) * residuals.square().sum().item()) / total
    margin = student_t_quantile(0.5 + confidence / 2, num_segments - 1) * standard_error
    return Estimate(value, (value - margin, value + margin))


def check_finite(values: torch.Tensor) -> None:
    """Stop the evaluation if a model's outputs overflow: no number describes them, and JSON has no NaN."""
    if not values.isfinite().all():
        raise EvaluationStopped("The model's outputs overflow: they contain NaN or infinity")


def perplexity_estimate(losses: torch.Tensor, counts: torch.Tensor, confidence: float) -> Estimate:
    """Perplexity, given losses and token counts per text segment; kept finite because JSON has no infinity."""
    return mean_estimate(losses, counts, confidence).map(lambda nats: math.exp(min(nats, 700.0)))


def proportion_estimate(successes: float, trials: int, confidence: float) -> Estimate:
    """A proportion with its Wilson score interval, which also holds when all or no trials succeed."""
    z = NormalDist().inv_cdf(0.5 + confidence / 2)
    value = successes / trials
    center = (value + z * z / (2 * trials)) / (1 + z * z / trials)
    margin = z / (1 + z * z / trials) * math.sqrt(value * (1 - value) / trials + z * z / (4 * trials * trials))
    low = center - margin if successes else 0.0
    return Estimate(value, (low, center + margin if successes < trials else 1.0))


@functools.cache
def student_t_quantile(probability: float, degrees_of_freedom: int) -> float:
    """Upper quantile of Student's t. With t = sqrt(df) tan(angle), its density becomes cos(angle)^(df - 1)."""
    angles = torch.linspace(0, math.pi / 2, 200_001, dtype=torch.float64)
    mass = torch.cumulative_trapezoid(angles.cos() ** (degrees_of_freedom - 1), angles)
    mass = torch.cat([mass.new_zeros(1), mass]) / mass[-1]
    target = 2 * probability - 1
    right = int(torch.searchsorted(mass, target))
    fraction = (target - mass[right - 1]) / (mass[right] - mass[right - 1])
    angle = torch.lerp(angles[right - 1], angles[right], fraction)
    return math.sqrt(degrees_of_freedom) * math.tan(angle.item())


@dataclasses.dataclass(frozen=True)
class Stopped:
    """Why there is no result, and the longest input that the model accepts if it refused this one."""

    reason: str
    max_length: int | None = None


@dataclasses.dataclass(frozen=True)
class BaseResult:
    """What every result has: the model's name, the window length, and why there is no value if there is none."""

    model: str
    length: int
    stopped: Stopped | None = None


@dataclasses.dataclass(frozen=True)
class PositionResult:
    """Perplexity of the tokens at positions `start` to `end` (exclusive) of their windows."""

    start: int
    end: int
    perplexity: Estimate
    num_tokens: int


@dataclasses.dataclass(frozen=True)
class PerplexityResult(BaseResult):
    """Perplexity on windows of one length, overall and by position.

    Attributes:
        segment_losses: Total loss of each text segment in nats, to compare models segment by segment.
        segment_tokens: Scored tokens of each text segment.
        text_hash: Hash of the token ids. Perplexities over different tokens are not comparable.
    """

    perplexity: Estimate | None = None
    num_tokens: int = 0
    num_windows: int = 0
    positions: tuple[PositionResult, ...] = ()
    segment_losses: tuple[float, ...] = ()
    segment_tokens: tuple[int, ...] = ()
    text_hash: str = ""


@dataclasses.dataclass(frozen=True)
class DepthResult:
    """Passkey trials at one depth, from 0 (start of the text) to 1 (end).

    Attributes:
        accuracy: Fraction of keys that greedy decoding reproduces exactly.
        preference: Fraction of trials in which the model prefers the key to a random one; 0.5 is chance.
        rank: Geometric mean rank of the key's tokens in the vocabulary; 1 is the model's first choice.
        log_prob: Mean log-probability of the key's tokens in nats.
    """

    depth: float
    num_trials: int
    accuracy: Estimate
    preference: Estimate
    rank: float
    log_prob: float


@dataclasses.dataclass(frozen=True)
class PasskeyResult(BaseResult):
    """Passkey retrieval by depth. `key_type` is "numbers", or "tokens" if the tokenizer cannot represent numbers."""

    depths: tuple[DepthResult, ...] = ()
    key_type: str = ""


@dataclasses.dataclass(frozen=True)
class ShuffleResult:
    """Loss in nats per token, and its increase when context tokens are shuffled in blocks (None: the whole window)."""

    block_size: int | None
    loss: Estimate
    loss_increase: Estimate
    num_tokens: int


@dataclasses.dataclass(frozen=True)
class OrderResult(BaseResult):
    """Sensitivity to token order, by block size."""

    shuffles: tuple[ShuffleResult, ...] = ()


@dataclasses.dataclass(frozen=True)
class SimilarityResult(BaseResult):
    """Similarity of mean-pooled embeddings to those of a reference model.

    Attributes:
        cosine: Mean cosine similarity of the two embeddings of each window.
        correlation: Correlation of all pairwise similarities between windows under both models. Unlike the cosine, it
            does not change if one embedding space is rotated.
    """

    reference: str = ""
    cosine: Estimate | None = None
    correlation: float | None = None
    num_windows: int = 0


Result = PerplexityResult | PasskeyResult | OrderResult | SimilarityResult
METRICS: dict[str, type[Result]] = {
    "perplexity": PerplexityResult,
    "passkey": PasskeyResult,
    "order": OrderResult,
    "similarity": SimilarityResult,
}


def from_json(expected: Any, value: Any) -> Any:
    """Rebuild a value of the expected type from its JSON form: nested dataclasses, and tuples instead of lists."""
    if isinstance(expected, types.UnionType):  # optional fields are `X | None`
        expected = typing.get_args(expected)[0]
    if isinstance(value, dict):
        hints = typing.get_type_hints(expected)
        return expected(**{name: from_json(hints[name], item) for name, item in value.items()})
    if isinstance(value, list):
        return tuple(from_json(typing.get_args(expected)[0], item) for item in value)
    return value
