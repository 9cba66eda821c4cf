"""What was measured, a record for each model and length. A record without a value says why the model stopped."""

from __future__ import annotations

import dataclasses
import types
import typing
from typing import Any

from .estimates import Estimate


@dataclasses.dataclass(frozen=True)
class Stop:
    """Where and why a model cannot go on."""

    reason: str
    reaches: int | None = None
    """The greatest length that works, where it is the model that ends."""


@dataclasses.dataclass(frozen=True)
class PositionResult:
    """Tokens at the places `start` to `end` (not included) of their windows."""

    start: int
    end: int
    perplexity: Estimate
    tokens: int


@dataclasses.dataclass(frozen=True)
class LengthResult:
    model: str
    length: int
    stop: Stop | None = None
    perplexity: Estimate | None = None
    tokens: int = 0
    windows: int = 0
    positions: tuple[PositionResult, ...] = ()
    losses: tuple[float, ...] = ()
    """Nats of each piece of text: two models on the same pieces are compared piece by piece."""
    counts: tuple[int, ...] = ()
    text: str = ""
    """A digest of the tokens: perplexities over other tokens are not comparable."""


@dataclasses.dataclass(frozen=True)
class DepthResult:
    """Trials with the key at one depth: 0 is the beginning of the text, 1 its end."""

    depth: float
    trials: int
    accuracy: Estimate
    """Share of keys that greedy decoding gives back in whole."""
    preference: Estimate
    """Share of trials in which the key is preferred to another one where the two first differ: a half is chance."""
    rank: float
    """Geometric mean of the rank of the key's tokens among all: 1 is the model's first choice."""
    log_probability: float
    """Of a token of the key, in nats."""


@dataclasses.dataclass(frozen=True)
class PasskeyResult:
    model: str
    length: int
    stop: Stop | None = None
    depths: tuple[DepthResult, ...] = ()
    keys: str = ""
    """'numbers', or 'tokens' where the tokenizer does not tell numbers apart."""


@dataclasses.dataclass(frozen=True)
class ShuffleResult:
    """The same tokens predicted from the same context in another order, shuffled in blocks of this many tokens."""

    block: int | None
    """None: the whole window."""
    loss: Estimate
    """In order, in nats."""
    increase: Estimate
    """By shuffling, in nats a token."""
    tokens: int


@dataclasses.dataclass(frozen=True)
class OrderResult:
    model: str
    length: int
    stop: Stop | None = None
    shuffles: tuple[ShuffleResult, ...] = ()


@dataclasses.dataclass(frozen=True)
class SimilarityResult:
    """Mean-pooled embeddings of the same windows, beside the original model's."""

    model: str
    length: int
    stop: Stop | None = None
    original: str = ""
    cosine: Estimate | None = None
    agreement: float | None = None
    """Correlation of the likenesses of all pairs of texts under both models: it does not mind a turned space."""
    windows: int = 0


Result = LengthResult | PasskeyResult | OrderResult | SimilarityResult
MEASURES: dict[str, type[Any]] = {
    "perplexity": LengthResult,
    "passkey": PasskeyResult,
    "order": OrderResult,
    "similarity": SimilarityResult,
}


def built(kind: Any, value: Any) -> Any:
    """A record again from what `dataclasses.asdict` and JSON made of it."""
    if dataclasses.is_dataclass(kind) and isinstance(value, dict):
        hints = typing.get_type_hints(kind)
        return kind(**{name: built(hints[name], item) for name, item in value.items()})  # type: ignore[operator]
    if typing.get_origin(kind) is tuple:
        return tuple(built(typing.get_args(kind)[0], item) for item in value)
    if isinstance(kind, types.UnionType) and value is not None:
        return built(next(part for part in typing.get_args(kind) if part is not type(None)), value)
    return value
