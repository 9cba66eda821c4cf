"""A text cut into windows of one length, each with the special tokens that its model expects around a text."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from .halt import Halt

SAMPLES = ("a", "0", "A", ".", "the 1", "\u4e00")
"""Texts of which a tokenizer knows one or another."""


@dataclasses.dataclass(frozen=True)
class Frame:
    """Tokens that stand before and behind every window."""

    before: tuple[int, ...] = ()
    behind: tuple[int, ...] = ()

    @classmethod
    def of(cls, tokenizer: Any, causal: bool) -> Frame:
        """What the tokenizer puts around a text by itself. A causal model has nothing to read behind the end."""
        if tokenizer is None:
            return cls()
        # Any text will do, but one of which nothing is left says nothing of what stands before and behind it.
        read = ((text, tokenizer(text, add_special_tokens=False)["input_ids"]) for text in SAMPLES)
        sample, plain = next(((text, ids) for text, ids in read if ids), ("", []))
        framed = tokenizer(sample)["input_ids"] if plain else []
        for start in range(len(framed) - len(plain) + 1):
            if framed[start : start + len(plain)] == plain:
                behind = () if causal else tuple(framed[start + len(plain) :])
                return cls(tuple(framed[:start]), behind)
        return cls()

    @property
    def size(self) -> int:
        return len(self.before) + len(self.behind)


@dataclasses.dataclass(frozen=True)
class Windows:
    """Windows by number: which tokens they hold, and from which place on their tokens are new."""

    stream: torch.Tensor
    frame: Frame
    length: int
    starts: tuple[int, ...]
    new_from: tuple[int, ...]
    """The place in each window from which on its tokens have not been in the window before."""

    @property
    def body(self) -> int:
        return self.length - self.frame.size

    @property
    def units(self) -> torch.Tensor:
        """Windows that overlap stand for one piece of text: the number of that piece for each window."""
        return torch.tensor([start // self.body for start in self.starts])

    def __len__(self) -> int:
        return len(self.starts)

    def rows(self, numbers: Sequence[int]) -> torch.Tensor:
        """Token ids, (numbers, length)."""
        before, behind = (torch.tensor(part, dtype=torch.long) for part in (self.frame.before, self.frame.behind))
        rows = [torch.cat([before, self.stream[self.starts[n] :][: self.body], behind]) for n in numbers]
        return torch.stack(rows)

    def text_places(self) -> torch.Tensor:
        """Which places of a window hold text, and no special token of its frame: (length,)."""
        places = torch.zeros(self.length, dtype=torch.bool)
        places[len(self.frame.before) : self.length - len(self.frame.behind)] = True
        return places


def cut(stream: torch.Tensor, frame: Frame, length: int, stride: int | None = None) -> Windows:
    """Windows side by side; or, with a stride, each so many tokens after the one before it.

    A stride longer than the window is none. What does not fill a window at the end is left out.
    """
    body = length - frame.size
    if body < 1:
        raise ValueError(f"a window of {length} tokens has no room beside {frame.size} special ones: take more")
    if stride is not None and stride < 1:
        raise ValueError(f"a stride must be 1 token or more, not {stride}")
    step = body if stride is None else min(stride, body)
    starts = tuple(range(0, len(stream) - body + 1, step))
    if not starts:
        raise Halt(
            f"the text has {len(stream):,} tokens, and does not fill one window of {length:,}: take more (or a higher "
            "max_tokens)"
        )
    first = len(frame.before)
    new_from = tuple(first if not start else first + body - step for start in starts)
    return Windows(stream, frame, length, starts, new_from)
