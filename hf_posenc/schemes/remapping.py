"""Longer inputs for a rotary model without training: far distances are remapped to distances that it was trained with.

All methods leave near keys as they are. Where a query meets a far key, both are rotated to other positions, whose
distance is the remapped one. Which keys are near or far depends on positions alone, so each pair of query and key has
exactly one distance.

Shape legend: B batch, Q queries, K keys.
"""

from __future__ import annotations

import abc
import dataclasses
from typing import Any, ClassVar, NamedTuple

import torch
from typing_extensions import Self

from ..errors import PosEncError
from ..validation import did_you_mean, truncate_repr
from .options import Options, option


class FarPositions(NamedTuple):
    """Where far keys begin, and the positions that queries and keys are rotated to when they meet."""

    starts_BQ: tuple[torch.Tensor, ...]
    """For each query, the position of the first near key; then that of the first key of each far part but the last."""
    queries_BQ: tuple[torch.Tensor, ...]
    """The positions of the queries in each far part, the nearest part first."""
    keys_BK: torch.Tensor
    """The positions of the keys in all far parts."""


class Extension(Options, abc.ABC):
    """Base of the methods, and of their options. For query i, key j and their distance m = i - j.

    Attributes:
        near: Which keys are near.
        formula: The remapped distance of far keys.
        paper: Authors, year and link.
    """

    near: ClassVar[str]
    formula: ClassVar[str]
    paper: ClassVar[str]

    @abc.abstractmethod
    def with_defaults(self, trained_length: int) -> Self:
        """The same method, with the options that were left out chosen for a trained length."""

    @property
    @abc.abstractmethod
    def near_length(self) -> int:
        """Inputs up to this length have near keys only."""

    @abc.abstractmethod
    def reach(self, trained_length: int) -> int | None:
        """The longest input whose remapped distances stay below the trained length; None if there is no such limit."""

    @abc.abstractmethod
    def far_positions(self, queries_BQ: torch.Tensor, keys_BK: torch.Tensor) -> FarPositions:
        """Remap the positions of queries and keys."""


class WindowOptions(Extension):
    """Keys less than `window` tokens back are near."""

    near = "m < window"
    window: int | None = option(None, "distances below this stay as they are", minimum=1)

    def with_defaults(self, trained_length: int) -> Self:
        return dataclasses.replace(self, window=self.window or max(trained_length // 2, 1))

    @property
    def near_length(self) -> int:
        assert self.window is not None
        return self.window

    def reach(self, trained_length: int) -> int | None:
        return None if self.near_length < trained_length else trained_length


class Rerope(WindowOptions):
    """ReRoPE: all far keys are at distance `window`."""

    formula = "window"
    paper = "Su 2023, https://kexue.fm/archives/9708"

    def far_positions(self, queries_BQ: torch.Tensor, keys_BK: torch.Tensor) -> FarPositions:
        window = self.near_length
        return FarPositions(
            (queries_BQ - window + 1,), (torch.full_like(queries_BQ, window),), torch.zeros_like(keys_BK)
        )


class LeakyRerope(WindowOptions):
    """Leaky ReRoPE: distances beyond `window` grow by 1/k per token."""

    formula = "window + (m - window) / k"
    paper = "Su 2023, https://kexue.fm/archives/9708"
    k: float = option(16.0, "tokens that share one step of distance beyond the window", minimum=1, maximum=1e6)

    def reach(self, trained_length: int) -> int | None:
        if self.near_length >= trained_length:
            return trained_length
        return self.near_length + max(int(self.k * (trained_length - 1 - self.near_length)) + 1, 0)

    def far_positions(self, queries_BQ: torch.Tensor, keys_BK: torch.Tensor) -> FarPositions:
        window = self.near_length
        queries = queries_BQ / self.k + (window - window / self.k)
        return FarPositions((queries_BQ - window + 1,), (queries,), keys_BK / self.k)


class SelfExtend(WindowOptions):
    """Self-Extend: beyond `window`, `group` consecutive positions share one."""

    formula = "floor(i / group) - floor(j / group) + window - floor(window / group)"
    paper = "Jin et al. 2024, https://arxiv.org/abs/2401.01325"
    group: int = option(8, "consecutive positions that share one beyond the window", minimum=1)

    def with_defaults(self, trained_length: int) -> Self:
        return dataclasses.replace(self, window=self.window or max(trained_length // 4, 1))

    def reach(self, trained_length: int) -> int | None:
        window = self.near_length
        if window >= trained_length:
            return trained_length
        return max(self.group * (trained_length - window + window // self.group), window)

    def far_positions(self, queries_BQ: torch.Tensor, keys_BK: torch.Tensor) -> FarPositions:
        window, group = self.near_length, self.group
        queries = queries_BQ.div(group, rounding_mode="floor") + (window - window // group)
        return FarPositions((queries_BQ - window + 1,), (queries,), keys_BK.div(group, rounding_mode="floor"))


class DualChunkAttention(Extension):
    """Dual chunk attention: keys of the query's own chunk are near; the chunk before and all others are far parts."""

    near = "in the query's chunk"
    formula = (
        "min(chunk_size + (i mod chunk_size), c) - (j mod chunk_size) in the chunk before, c - (j mod chunk_size) in "
        "all others, with c = chunk_size + local_window - 1"
    )
    paper = "An et al. 2024, https://arxiv.org/abs/2402.17463"
    chunk_size: int | None = option(
        None, "tokens of a chunk, without `local_window`; keys of the query's own chunk are near", minimum=1
    )
    local_window: int | None = option(
        None, "distances to the previous chunk that stay as they are, for queries at the start of a chunk", minimum=1
    )

    def with_defaults(self, trained_length: int) -> Self:
        chunk_size = self.chunk_size or max(3 * trained_length // 4, 1)
        local_window = self.local_window or min(max(trained_length - chunk_size, 1), chunk_size)
        if local_window > chunk_size:
            raise PosEncError(
                f"rope: extend: local_window must be at most chunk_size ({chunk_size}), got {local_window}"
            )
        return dataclasses.replace(self, chunk_size=chunk_size, local_window=local_window)

    @property
    def near_length(self) -> int:
        assert self.chunk_size is not None
        return self.chunk_size

    @property
    def max_distance(self) -> int:
        """The largest distance of all pairs."""
        assert self.local_window is not None
        return self.near_length + self.local_window - 1

    def reach(self, trained_length: int) -> int | None:
        return None if self.max_distance < trained_length else trained_length

    def far_positions(self, queries_BQ: torch.Tensor, keys_BK: torch.Tensor) -> FarPositions:
        size, last = self.near_length, self.max_distance
        chunk_starts = queries_BQ.div(size, rounding_mode="floor") * size
        successive = (queries_BQ - chunk_starts + size).clamp(max=last)
        return FarPositions(
            (chunk_starts, chunk_starts - size), (successive, torch.full_like(queries_BQ, last)), keys_BK % size
        )


METHODS: dict[str, type[Extension]] = {
    "self_extend": SelfExtend,
    "rerope": Rerope,
    "leaky_rerope": LeakyRerope,
    "dca": DualChunkAttention,
}


def parse_extension(extend: dict[str, Any]) -> Extension:
    """The method that a rotary scheme's `extend` names, with its options.

    Raises:
        PosEncError: If the method or an option is unknown, or a value is out of bounds.
    """
    name = extend.get("method")
    method = METHODS.get(name) if isinstance(name, str) else None
    if method is None:
        if name is None:
            example = '{"method": "self_extend", "window": 512, "group": 4}'
            raise PosEncError(f"extend needs a method, one of {sorted(METHODS)}, as in {example}")
        raise PosEncError(f"extend: unknown method {truncate_repr(name)}{did_you_mean(name, METHODS)}")
    valid = [field.name for field in dataclasses.fields(method)]
    values = {key: value for key, value in extend.items() if key != "method"}
    if unknown := [key for key in values if key not in valid]:
        raise PosEncError(f"extend: {name} has no option {truncate_repr(unknown[0])}{did_you_mean(unknown[0], valid)}")
    try:
        return method(**values)
    except PosEncError as error:
        raise PosEncError(f"extend: {name}: {error}") from None
