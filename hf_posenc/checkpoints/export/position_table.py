"""A model with a position table and schemes that add to the input: the same model type, with the table written out."""

from __future__ import annotations

import torch
from torch import nn

from ...errors import PosEncError
from ...schemes import InputScheme, Positions
from ...schemes.base import LAYER_SEAMS
from ...schemes.learned import Learned
from .plan import Exporter, ExportPlan, narrow_if_exact
from .same_rotation import scheme_names
from .variant import NoStockEqual, Variant


def _plan(variant: Variant, max_positions: int | None) -> ExportPlan:
    for seams in variant.plan.state.active:
        acting = [index for seam in LAYER_SEAMS for index in seams[seam]]
        if acting:
            raise NoStockEqual(f"{variant.schemes[acting[0]].name} acts inside attention")
    num_positions = max_positions or default_positions(variant)
    rows = added_rows(variant, num_positions)
    architecture, config = variant.architecture, variant.stock_config()
    config.max_position_embeddings = num_positions + variant.shape.table_first_row - architecture.extra_rows
    parameter = f"{variant.prefix}{architecture.table}.weight"
    table = torch.cat([_rows_before_first(variant, parameter, rows.shape[1]), rows])
    assert tuple(table.shape) == architecture.table_shape(config)
    plan = ExportPlan(config, variant.head, variant.head, names=scheme_names(variant), max_positions=num_positions)
    if parameter in variant.stored_names:
        plan.transforms[variant.stored_names[parameter]] = lambda stored: narrow_if_exact(table, stored.dtype)
    else:
        plan.added[parameter] = lambda: table
    plan.checked_position = max(num_positions - 24, 0)
    return plan


def default_positions(variant: Variant) -> int:
    """The length of a learned table if there is one, else the length that the checkpoint was trained for."""
    lengths = [scheme.max_positions for scheme in variant.schemes if isinstance(scheme, Learned)]
    return min(lengths, default=variant.shape.max_positions)


def input_schemes(variant: Variant) -> list[InputScheme]:
    """The schemes at the input embedding. Raises `NoStockEqual` if any does more than add."""
    schemes = [variant.schemes[index] for index in variant.plan.state.at_embedding]
    for scheme in schemes:
        if not isinstance(scheme, InputScheme) or scheme.mixer is not None:
            raise NoStockEqual(f"{scheme.name} does more than add to the input embedding")
    return schemes  # type: ignore[return-value]


@torch.no_grad()
def added_rows(variant: Variant, num_positions: int) -> torch.Tensor:
    """What all schemes of a variant together add to the input embedding at each position: (positions, width)."""
    schemes, shape = input_schemes(variant), variant.shape
    width = shape.embedding_size or shape.hidden_size
    positions = _positions(num_positions, shape.causal)
    rows = torch.zeros(1, num_positions, width)
    for scheme in schemes:
        if isinstance(scheme, Learned) and num_positions > scheme.max_positions:
            raise PosEncError(
                f"max_positions={num_positions} is longer than the {scheme.max_positions} positions of learned: export "
                'fewer, or extend the table when you convert, with "max_positions" and "extend" in its options'
            )
        rows = scheme.embed(rows, positions)
    for scheme in schemes:
        if isinstance(scheme, Learned) and scheme.uses_stock_table():
            rows = rows + _stock_rows(variant, scheme, num_positions)
    return rows[0]


def _stock_rows(variant: Variant, scheme: Learned, num_positions: int) -> torch.Tensor:
    """The rows of the architecture's own table, extended if the scheme says so."""
    weight = variant.read(f"{variant.prefix}{variant.architecture.table}.weight").float()
    table = nn.Embedding.from_pretrained(weight)
    rows: torch.Tensor = scheme.patch_embedding(table, scheme_owned=False)(torch.arange(num_positions))
    return rows


def _rows_before_first(variant: Variant, parameter: str, width: int) -> torch.Tensor:
    """The rows of the stock table before the one of position 0, which padding may read."""
    first_row = variant.shape.table_first_row
    if parameter in variant.stored_names:
        return variant.read(parameter)[:first_row].float()
    return torch.zeros(first_row, width)


def _positions(length: int, causal: bool) -> Positions:
    if length < 1:
        raise PosEncError(f"max_positions must be at least 1, got {length}")
    queries = torch.arange(length)
    return Positions(
        queries[None],
        torch.arange(1 - length, length),
        uniform=True,
        key_length=length,
        length_bound=length,
        cached=False,
        num_cached=0,
        cache_filled_at=None,
        packed=False,
        causal=causal,
        backend="eager",
        dtype=torch.float32,
    )


POSITION_TABLE = Exporter(
    target="the same model type, with its position table written out",
    accepts="`learned` (extended too), `window`, `sinusoidal`, `polynomial`, `exponential`, added; and `none`",
    applies=lambda variant: variant.architecture.table is not None,
    plan=_plan,
)
