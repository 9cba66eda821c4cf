"""One trained vector for every position, mixed into the word embeddings."""

from __future__ import annotations

import dataclasses
from typing import Literal

import torch
from torch import nn
from transformers import initialization as init

from .base import Kind, ModelShape
from .functional import extended_rows
from .inputs import Positions, check_table_length
from .mixing import TABLE_INIT_STD, InputScheme, MixOptions
from .options import at_least, option


@dataclasses.dataclass(frozen=True, kw_only=True)
class LearnedOptions(MixOptions):
    max_positions: int | None = option(None, "positions the table serves; None: the model's own", at_least(1))
    extend: Literal["interpolate", "tile", "hierarchical"] | None = option(
        None, "how the checkpoint's own table serves more positions than it has rows"
    )
    init: Literal["neutral", "paper"] = option(
        "neutral", "of a table that the checkpoint does not bring: zeros, or at random as BERT and GPT-2 begin"
    )


class PatchedPositionEmbedding(nn.Embedding):
    """Replaces the architecture's position table and shares its weight, so that the state dict stays the same.

    Args:
        table: The table to replace.
        extend: How to compute rows that the table lacks; None if it has them all.
        max_positions: How many positions the extended table has.
        scheme_owned: Whether only the scheme reads the table. The architecture then adds zero.
    """

    def __init__(self, table: nn.Embedding, extend: str | None, max_positions: int, scheme_owned: bool) -> None:
        super().__init__(table.num_embeddings, table.embedding_dim, table.padding_idx, _weight=table.weight)
        self.weight = table.weight  # the same Parameter: an optimizer may already hold it
        self.extend, self.max_positions, self.scheme_owned = extend, max_positions, scheme_owned
        self.train(table.training)

    def forward(self, position_ids: torch.Tensor, for_scheme: bool = False) -> torch.Tensor:
        if self.scheme_owned and not for_scheme:
            return torch.zeros((), device=position_ids.device)
        if self.extend is None:
            return super().forward(position_ids)
        return extended_rows(self.weight, position_ids, self.extend, self.max_positions)


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

    def patch_embedding(self, table: nn.Embedding, scheme_owned: bool) -> nn.Embedding:
        extend = self.options.extend if self.max_positions > table.num_embeddings else None
        if extend is None and not scheme_owned:
            return table
        return PatchedPositionEmbedding(table, extend, self.max_positions, scheme_owned)

    def embed(self, inputs_embeds_BQE: torch.Tensor, positions: Positions) -> torch.Tensor:
        self._refuse_long_inputs(positions)
        if self.uses_stock_table() and positions.table is None:
            return inputs_embeds_BQE  # the architecture adds its table itself, where it always did
        return super().embed(inputs_embeds_BQE, positions)

    def position_embeddings(self, positions: Positions) -> torch.Tensor:
        if positions.table is not None:
            return positions.table(positions.queries_BQ, for_scheme=True)
        return nn.functional.embedding(positions.queries_BQ, self.weight)

    def _refuse_long_inputs(self, positions: Positions) -> None:
        more = ""
        if self.shape.table_size is not None:
            more = 'stretch the table with position_scheme={{"type": "learned", "max_positions": {length}, "extend": '
            more += '"interpolate"}}'
        check_table_length("learned", positions, self.max_positions, more)
