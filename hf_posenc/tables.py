"""Tables with one row for each position: where they end, and what to say then."""

from __future__ import annotations

from .scheme import Positions, tracing


def refuse_past_the_table(name: str, positions: Positions, max_positions: int, way_out: str = "") -> None:
    """Raise ValueError if a position has no row; `way_out` is one beside the usual, `{length}` in it is filled in."""
    if positions.length_bound is not None and positions.length_bound <= max_positions:
        return  # the common case, known without reading a tensor
    length = positions.length()
    if not tracing() and int(positions.queries_BQ.min()) < 0:
        raise ValueError(f"position_ids must not be negative: the {name} table begins at position 0")
    if length is not None and length > max_positions:
        ways = "cut the input, or convert to a scheme that extends (rope, alibi, t5, sinusoidal, none)"
        if way_out:
            ways = f"{ways}, or {way_out.format(length=length)}"
        raise ValueError(
            f"the input reaches position {length - 1} (length {length}), but the {name} "
            f"table serves {max_positions} positions: {ways}"
        )
