"""One trained vector for every position, mixed into the word embeddings."""

from __future__ import annotations

import dataclasses
from typing import Literal

import torch
from torch import nn
from transformers import initialization as init

from .base import Kind, ModelShape
from .inputs import Positions, check_table_length
from .mixing import TABLE_INIT_STD, InputScheme, MixOptions
from .options import at_least, option

HIERARCHY_WEIGHT = 0.4
"""Share of the coarse row in a hierarchical table (Su 2020)."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LearnedOptions(MixOptions):
    max_positions: int | None = option(None, "positions the table serves; None: the model's own", at_least(1))
    extend: Literal["interpolate", "tile", "hierarchical"] | None = option(
        None, "how the checkpoint's own table serves more positions than it has rows"
    )
    init: Literal["neutral", "paper"] = option(
        "neutral", "of a table that the checkpoint does not bring: zeros, or at random as BERT and GPT-2 begin"
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


class OwnTable(nn.Embedding):
    """The architecture's own table, read otherwise; its class is put in place of `nn.Embedding`.

    Held, it gives the architecture nothing and is read by the scheme alone, which asks with `read=True`.
    """

    how: str | None
    max_positions: int
    held: bool

    def forward(self, positions: torch.Tensor, read: bool = False) -> torch.Tensor:
        if self.held and not read:
            return torch.zeros((), device=positions.device)
        return super().forward(positions) if self.how is None else self._extended(positions, self.how)

    def _extended(self, positions: torch.Tensor, how: str) -> torch.Tensor:
        return extended_rows(self.weight, positions, how, self.max_positions)


class Learned(InputScheme):
    """One trained vector for each position. GPT-2 and BERT keep their own table; LLaMA gets one that starts at zero."""

    name = "learned"
    paper = "Gehring et al. 2017, https://arxiv.org/abs/1705.03122"
    kind = Kind.INPUT
    formula = "x_i + p_i"
    cost = "one row a position; a lookup. GPT-2 and BERT keep theirs, LLaMA gets one"
    neutral = "`weight` is 0 (LLaMA); GPT-2 and BERT go on with their own table"
    extends = False
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
            self.weight = nn.Parameter(torch.empty(self.max_positions, self.position_size))
            return
        if self.position_size != shape.hidden_size:
            raise ValueError(
                f"learned: position_size={self.position_size} does not fit the checkpoint's own table, which is "
                f"{shape.hidden_size} wide; leave it out"
            )
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
        if self.shape.table_size is not None:
            return
        if self.options.init == "paper":
            init.normal_(self.weight, std=TABLE_INIT_STD)
        else:
            init.zeros_(self.weight)

    def uses_stock_table(self) -> bool:
        return self.shape.table_size is not None

    def patch_embedding(self, table: nn.Embedding, held: bool) -> None:
        """Give the table the extended lookup where one is asked for, and silence it where held."""
        extended = self.options.extend if self.max_positions > table.num_embeddings else None
        if extended or held:
            settings = {"how": extended, "max_positions": self.max_positions, "held": held}
            table.__class__ = OwnTable
            table.__dict__.update(settings)

    def unpatch_embedding(self, table: nn.Embedding) -> None:
        if type(table) is OwnTable:
            table.__class__ = nn.Embedding  # type: ignore[assignment]
            for name in ("how", "max_positions", "held"):
                del table.__dict__[name]

    def embed(self, inputs_embeds_BQE: torch.Tensor, positions: Positions) -> torch.Tensor:
        self._refuse_long_inputs(positions)
        if self.uses_stock_table() and positions.table is None:
            return inputs_embeds_BQE  # the architecture adds its table itself, where it always did
        return super().embed(inputs_embeds_BQE, positions)

    def vectors(self, positions: Positions) -> torch.Tensor:
        if positions.table is not None:
            return positions.table(positions.queries_BQ, read=True)
        return nn.functional.embedding(positions.queries_BQ, self.weight)

    def _refuse_long_inputs(self, positions: Positions) -> None:
        more = ""
        if self.shape.table_size is not None:
            more = 'stretch the table with position_scheme={{"type": "learned", "max_positions": {length}, "extend": '
            more += '"interpolate"}}'
        check_table_length("learned", positions, self.max_positions, more)
