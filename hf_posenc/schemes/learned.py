"""Learned position embeddings (Gehring et al. 2017): a trained vector per position, or per window and offset."""

from typing import Any, Literal

import torch
from torch import nn

from ..errors import PosEncError
from . import InputScheme, MixOptions, ModelShape, Positions, describe_type, option
from .functional import paper_or_neutral
from .inputs import check_table_length

EXTEND = 'extend the table: position_scheme={{"type": "learned", "max_positions": {length}, "extend": "interpolate"}}'
Extend = Literal["interpolate", "tile", "hierarchical"]
INIT_STD = 0.02
"""Of a new table, as in BERT and GPT-2."""
HIERARCHY_WEIGHT = 0.4
"""Weight of the coarse row in a hierarchically extended table (Su 2020)."""


class LearnedOptions(MixOptions):
    max_positions: int | None = option(None, "length of the table; None: as the checkpoint's", minimum=1)
    extend: Extend | None = option(None, "how to compute positions beyond the checkpoint's table")
    init: Literal["neutral", "paper"] = option("neutral", "start of a new table: zeros, or random as in BERT and GPT-2")


def extended_rows(weight: torch.Tensor, positions: torch.Tensor, extend: str, max_positions: int) -> torch.Tensor:
    """One row per position, (..., width), of a table of `max_positions` rows made from a shorter one."""
    rows = weight.shape[0]
    embedding = nn.functional.embedding
    if extend == "tile":
        return embedding(positions % rows, weight)
    if extend == "interpolate":
        wide = positions.to(torch.promote_types(weight.dtype, torch.float32))
        scaled = wide * ((rows - 1) / max(max_positions - 1, 1))
        low = scaled.floor().long()
        fraction = (scaled - low).unsqueeze(-1).to(weight.dtype)
        return embedding(low, weight) * (1 - fraction) + embedding((low + 1).clamp(max=rows - 1), weight) * fraction
    a = HIERARCHY_WEIGHT
    base = (weight - a * weight[:1]) / (1 - a)
    extended = a * embedding(positions // rows, base) + (1 - a) * embedding(positions % rows, base)
    # The first rows are taken from the table itself: rounding would otherwise change them.
    is_stored = (positions < rows).unsqueeze(-1)
    return torch.where(is_stored, embedding(positions.clamp(max=rows - 1), weight), extended)


class PatchedPositionEmbedding(nn.Embedding):
    """Replaces the architecture's position table and shares its weight, so that state dicts stay the same.

    If `scheme_owned`, the architecture gets zeros and only the scheme reads the table. Position 0 is in row
    `first_row`, whichever way the architecture has of skipping the rows before it.
    """

    def __init__(
        self, table: nn.Embedding, extend: str | None, max_positions: int, scheme_owned: bool, first_row: int
    ) -> None:
        super().__init__(table.num_embeddings, table.embedding_dim, table.padding_idx, _weight=table.weight)
        self.weight = table.weight  # the same Parameter: an optimizer may already hold it
        self.extend, self.max_positions, self.scheme_owned = extend, max_positions, scheme_owned
        self.first_row = first_row
        self.train(table.training)

    def forward(self, *args: Any, position_ids: torch.Tensor | None = None, for_scheme: bool = False) -> torch.Tensor:
        position_ids = args[0] if position_ids is None else position_ids
        if self.scheme_owned and not for_scheme:
            return torch.zeros((), device=position_ids.device)
        if self.extend is None:
            return super().forward(position_ids + self.first_row)
        return extended_rows(self.weight[self.first_row :], position_ids, self.extend, self.max_positions)


class Learned(InputScheme[LearnedOptions]):
    """One trained vector per position. GPT-2 and BERT keep their table; LLaMA gets one that starts at zero."""

    name = "learned"
    paper = "Gehring et al. 2017, https://arxiv.org/abs/1705.03122"
    formula = "x_i + p_i"
    cost = "one row per position; a lookup. GPT-2 and BERT keep their table, LLaMA gets a new one"
    neutral = "`weight` is 0 (LLaMA); GPT-2 and BERT keep their table"
    tested_against = "the stock model, bit-identical; a stock LLaMA with the table added; loops for `extend`"
    extends = False
    Options = LearnedOptions
    weight: torch.Tensor

    def __init__(self, options: LearnedOptions, shape: ModelShape) -> None:
        super().__init__(options, shape)
        rows = shape.table_size
        self.max_positions = options.max_positions or rows or shape.max_positions
        if rows is None:
            if options.extend:
                raise PosEncError(
                    "learned: extend needs a position table, and this architecture has none; leave it out"
                )
            table_shape = (self.max_positions, self.position_size)
            self.add_parameters(weight=(table_shape, paper_or_neutral(options.init, INIT_STD)))
            return
        if self.position_size != self.embedding_size:
            raise PosEncError(f"learned: the checkpoint's table is {self.embedding_size} wide; leave position_size out")
        request = f"learned: max_positions={self.max_positions} exceeds"
        if self.max_positions > rows and not options.extend:
            raise PosEncError(f'{request} the table\'s {rows} rows; add "extend": {describe_type(Extend)}')
        if options.extend == "hierarchical" and self.max_positions > rows**2:
            raise PosEncError(f'{request} {rows**2}, the limit of a hierarchical table; use "extend": "tile"')

    def uses_stock_table(self) -> bool:
        return self.shape.table_size is not None

    def patch_embedding(self, table: nn.Embedding, scheme_owned: bool) -> nn.Embedding:
        first_row = self.shape.table_first_row
        extend = self.options.extend if self.max_positions > table.num_embeddings - first_row else None
        if extend is None and not scheme_owned and not first_row:
            return table
        return PatchedPositionEmbedding(table, extend, self.max_positions, scheme_owned, first_row)

    def embed(self, inputs_embeds_BQE: torch.Tensor, positions: Positions) -> torch.Tensor:
        # As in the stock model, position_ids may reach the rows before the one of position 0.
        first_position = 0 if self.options.extend else -self.shape.table_first_row
        way_out = EXTEND if self.uses_stock_table() else ""
        check_table_length("learned", positions, self.max_positions, way_out, first_position)
        if self.uses_stock_table() and positions.table is None:
            return inputs_embeds_BQE  # the architecture adds its table itself
        return super().embed(inputs_embeds_BQE, positions)

    def position_embeddings(self, positions: Positions) -> torch.Tensor:
        if positions.table is None:
            return nn.functional.embedding(positions.queries_BQ, self.weight)
        embeddings: torch.Tensor = positions.table(positions.queries_BQ, for_scheme=True)
        return embeddings


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
    tested_against = "the stock model with both tables added"
    Options = WindowOptions
    offsets: torch.Tensor
    windows: torch.Tensor

    def __init__(self, options: WindowOptions, shape: ModelShape) -> None:
        super().__init__(options, shape)
        num_windows = -(-shape.max_positions // options.window_size)
        initializer = paper_or_neutral(options.init, INIT_STD)
        self.add_parameters(
            offsets=((options.window_size, self.position_size), initializer),
            windows=((num_windows, self.position_size), initializer),
        )

    def position_embeddings(self, positions: Positions) -> torch.Tensor:
        size, embedding = self.options.window_size, nn.functional.embedding
        windows = (positions.queries_BQ // size).clamp(max=self.windows.shape[0] - 1)
        return embedding(positions.queries_BQ % size, self.offsets) + embedding(windows, self.windows)
