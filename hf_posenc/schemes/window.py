"""Learned embeddings by window: one for the place inside of it, one for which window it is."""

from __future__ import annotations

import dataclasses
from typing import Literal

import torch
from torch import nn
from transformers import initialization as init

from ..options import Options, at_least, option
from ..scheme import ModelShape, Positions, Scheme


@dataclasses.dataclass(frozen=True, kw_only=True)
class WindowOptions(Options):
    window_size: int = option(128, "positions in a window", at_least(1))
    mix: Literal["add"] = option("add", "how words and positions are put together")


class Window(Scheme):
    """Two trained vectors, for the place inside of a window and for the window; both start at zero.

    Past the trained length, places go on and all further windows are the last one.
    """

    name = "window"
    paper = "no single one: a learned table (Gehring et al. 2017), split by quotient and remainder"
    extends = True
    at_input = True
    Options = WindowOptions
    options: WindowOptions

    def __init__(self, options: WindowOptions, shape: ModelShape) -> None:
        super().__init__(options, shape)
        windows = -(-shape.max_positions // options.window_size)
        self.places = nn.Parameter(torch.empty(options.window_size, shape.hidden_size))
        self.windows = nn.Parameter(torch.empty(windows, shape.hidden_size))

    def reset_parameters(self) -> None:
        init.zeros_(self.places)
        init.zeros_(self.windows)

    def embed(self, words_BQE: torch.Tensor, positions: Positions) -> torch.Tensor:
        size, lookup = self.options.window_size, nn.functional.embedding
        place = lookup(positions.queries_BQ % size, self.places)
        window = lookup((positions.queries_BQ // size).clamp(max=self.windows.shape[0] - 1), self.windows)
        return words_BQE + (place + window).to(words_BQE.dtype)
