"""One trained vector for every position, added to the word embeddings."""

from __future__ import annotations

import dataclasses
from typing import Literal

import torch
from torch import nn
from transformers import initialization as init

from ..options import Options, at_least, option
from ..scheme import ModelShape, Positions, Scheme, tracing

HIERARCHY_WEIGHT = 0.4
"""Share of the coarse row in a hierarchical table (Su 2020)."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LearnedOptions(Options):
    mix: Literal["add"] = option("add", "how words and positions are put together")
    max_positions: int | None = option(None, "positions the table serves; None: the model's own", at_least(1))
    extend: Literal["interpolate", "tile", "hierarchical"] | None = option(
        None, "how the checkpoint's own table serves more positions than it has rows"
    )


def extended_rows(weight: torch.Tensor, positions: torch.Tensor, how: str, max_positions: int) -> torch.Tensor:
    """Rows for `positions` out of a table with fewer rows, computed from it: its parameters stay as they are."""
    rows = weight.shape[0]
    embedding = nn.functional.embedding
    if how == "tile":
        return embedding(positions % rows, weight)
    if how == "interpolate":
        wide = torch.promote_types(weight.dtype, torch.float32)
        places = positions.to(wide) * ((rows - 1) / max(max_positions - 1, 1))
        low = places.floor().long()
        share = (places - low).unsqueeze(-1).to(weight.dtype)
        return embedding(low, weight) * (1 - share) + embedding((low + 1).clamp(max=rows - 1), weight) * share
    a = HIERARCHY_WEIGHT
    base = (weight - a * weight[:1]) / (1 - a)
    extended = a * embedding(positions // rows, base) + (1 - a) * embedding(positions % rows, base)
    # The first rows are the checkpoint's own, to the bit: rounding would otherwise move them.
    own = (positions < rows).unsqueeze(-1)
    return torch.where(own, embedding(positions.clamp(max=rows - 1), weight), extended)


class ExtendedTable(nn.Embedding):
    """The architecture's own table with the lookup of `extended_rows`; its class is put in place of `nn.Embedding`."""

    how: str
    max_positions: int

    def forward(self, positions: torch.Tensor) -> torch.Tensor:
        return extended_rows(self.weight, positions, self.how, self.max_positions)


class Learned(Scheme):
    """One trained vector for each position. GPT-2 and BERT keep their own table; LLaMA gets one that starts at zero."""

    name = "learned"
    paper = "Gehring et al. 2017, https://arxiv.org/abs/1705.03122"
    extends = False
    at_input = True
    Options = LearnedOptions
    options: LearnedOptions

    def __init__(self, options: LearnedOptions, shape: ModelShape) -> None:
        super().__init__(options, shape)
        own = shape.table_size
        self.max_positions = options.max_positions or own or shape.max_positions
        if own is None:
            if options.extend:
                raise ValueError(
                    f"learned: extend={options.extend!r} needs a checkpoint with a position table of its own, and "
                    "this architecture has none; leave extend out"
                )
            self.weight = nn.Parameter(torch.empty(self.max_positions, shape.hidden_size))
            return
        limit = own * own if options.extend == "hierarchical" else self.max_positions
        if self.max_positions > own and not options.extend:
            raise ValueError(
                f"learned: max_positions={self.max_positions} is more than the {own} rows of the checkpoint's table; "
                'add "extend": "interpolate", "tile" or "hierarchical"'
            )
        if self.max_positions > limit:
            raise ValueError(
                f"learned: max_positions={self.max_positions} is more than the {limit} that a hierarchical table "
                f'over {own} rows reaches; lower it, or use "extend": "interpolate" or "tile"'
            )

    def reset_parameters(self) -> None:
        if self.shape.table_size is None:
            init.zeros_(self.weight)

    def keeps_table(self) -> bool:
        return self.shape.table_size is not None

    def dress_table(self, table: nn.Embedding) -> None:
        """Give the architecture's own table the extended lookup, where one is asked for."""
        if self.options.extend and self.max_positions > table.num_embeddings:
            table.__class__ = ExtendedTable
            table.__dict__.update(how=self.options.extend, max_positions=self.max_positions)

    def undress_table(self, table: nn.Embedding) -> None:
        if type(table) is ExtendedTable:
            table.__class__ = nn.Embedding  # type: ignore[assignment]
            del table.__dict__["how"], table.__dict__["max_positions"]

    def embed(self, words_BQE: torch.Tensor, positions: Positions) -> torch.Tensor:
        self._refuse_past_the_table(positions)
        if self.keeps_table():
            return words_BQE  # the architecture adds its table itself, where it always did
        return words_BQE + nn.functional.embedding(positions.queries_BQ, self.weight).to(words_BQE.dtype)

    def _refuse_past_the_table(self, positions: Positions) -> None:
        if positions.length_bound is not None and positions.length_bound <= self.max_positions:
            return  # the common case, known without reading a tensor
        length = positions.length()
        if not tracing() and int(positions.queries_BQ.min()) < 0:
            raise ValueError("position_ids must not be negative: a learned table begins at position 0")
        if length is not None and length > self.max_positions:
            ways = "cut the input, or convert to a scheme that extends (rope, alibi, t5, sinusoidal, none)"
            if self.shape.table_size is not None:
                more = f'{{"type": "learned", "max_positions": {length}, "extend": "interpolate"}}'
                ways = f"{ways}, or stretch the table with position_scheme={more}"
            raise ValueError(
                f"the input reaches position {length - 1} (length {length}), but the learned "
                f"table serves {self.max_positions} positions: {ways}"
            )
