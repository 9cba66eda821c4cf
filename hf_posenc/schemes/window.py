"""Window embeddings: a learned table (Gehring et al. 2017) split into offset and window."""

from typing import Literal

import torch
from torch import nn
from transformers import initialization as init

from . import InputScheme, MixOptions, ModelShape, Positions, option
from .mixing import TABLE_INIT_STD


class WindowOptions(MixOptions):
    window_size: int = option(128, "positions per window", minimum=1)
    init: Literal["neutral", "paper"] = option("neutral", "zero tables, or random like a learned table")


class Window(InputScheme[WindowOptions]):
    """Two learned vectors per position: one for the offset inside its window, one for the window.

    Beyond the trained length, offsets continue and every further window uses the last one's vector.
    """

    name = "window"
    paper = "no single paper: a learned table (Gehring et al. 2017), split by quotient and remainder"
    formula = "x_i + a_(i mod w) + b_min(i div w, last)"
    cost = "w rows, and one per window; two lookups"
    neutral = "`offsets` and `windows` are 0"
    extends = True
    Options = WindowOptions

    def __init__(self, options: WindowOptions, shape: ModelShape) -> None:
        super().__init__(options, shape)
        num_windows = -(-shape.max_positions // options.window_size)
        self.offsets = nn.Parameter(torch.empty(options.window_size, self.position_size))
        self.windows = nn.Parameter(torch.empty(num_windows, self.position_size))

    def reset_parameters(self) -> None:
        for table in (self.offsets, self.windows):
            if self.options.init == "paper":
                init.normal_(table, std=TABLE_INIT_STD)
            else:
                init.zeros_(table)

    def position_embeddings(self, positions: Positions) -> torch.Tensor:
        size, embedding = self.options.window_size, nn.functional.embedding
        windows = (positions.queries_BQ // size).clamp(max=self.windows.shape[0] - 1)
        return embedding(positions.queries_BQ % size, self.offsets) + embedding(windows, self.windows)
