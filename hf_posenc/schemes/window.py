"""Learned embeddings by window: one for the place inside of it, one for which window it is."""

from __future__ import annotations

import dataclasses
from typing import Literal

import torch
from torch import nn
from transformers import initialization as init

from .base import Kind, ModelShape
from .inputs import Positions
from .mixing import TABLE_INIT_STD, InputScheme, MixOptions
from .options import at_least, option


@dataclasses.dataclass(frozen=True, kw_only=True)
class WindowOptions(MixOptions):
    window_size: int = option(128, "positions in a window", at_least(1))
    init: Literal["neutral", "paper"] = option("neutral", "tables of zeros, or at random as a learned table is")


class Window(InputScheme):
    """Two trained vectors, for the place inside of a window and for the window; both start at zero.

    Past the trained length, places go on and all further windows are the last one.
    """

    name = "window"
    paper = "no single one: a learned table (Gehring et al. 2017), split by quotient and remainder"
    kind = Kind.INPUT
    formula = "x_i + a_(i mod w) + b_min(i div w, last)"
    cost = "w rows and one a window; two lookups"
    neutral = "`places` and `windows` are 0"
    extends = True
    Options = WindowOptions
    options: WindowOptions

    def __init__(self, options: WindowOptions, shape: ModelShape) -> None:
        super().__init__(options, shape)
        windows = -(-shape.max_positions // options.window_size)
        self.places = nn.Parameter(torch.empty(options.window_size, self.position_size))
        self.windows = nn.Parameter(torch.empty(windows, self.position_size))

    def reset_parameters(self) -> None:
        for table in (self.places, self.windows):
            if self.options.init == "paper":
                init.normal_(table, std=TABLE_INIT_STD)
            else:
                init.zeros_(table)

    def position_embeddings(self, positions: Positions) -> torch.Tensor:
        size, lookup = self.options.window_size, nn.functional.embedding
        place = lookup(positions.queries_BQ % size, self.places)
        window = lookup((positions.queries_BQ // size).clamp(max=self.windows.shape[0] - 1), self.windows)
        return place + window
