"""Store the same weights in another layout: reordered rotary features, or a longer position table."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, get_args

from ..errors import PosEncError

if TYPE_CHECKING:
    import torch

RotaryChange = Literal["interleaved_to_halves", "halves_to_interleaved"]
TableExtension = Literal["interpolate", "tile", "hierarchical"]


def rotary_feature_order(change: RotaryChange, head_size: int, rotary_size: int | None = None) -> list[int]:
    """For each feature of a head, its index before the change. A partial rotation moves the first `rotary_size`."""
    rotary_size = head_size if rotary_size is None else rotary_size
    if rotary_size % 2 or not 0 < rotary_size <= head_size:
        raise PosEncError(f"Rotary features come in pairs: cannot reorder {rotary_size} of {head_size} features")
    if change not in get_args(RotaryChange):
        raise PosEncError(f"Unknown rotary change {change!r}; expected one of {', '.join(get_args(RotaryChange))}")
    order = [*range(0, rotary_size, 2), *range(1, rotary_size, 2)]
    if change == "halves_to_interleaved":
        order = [order.index(feature) for feature in range(rotary_size)]
    return [*order, *range(rotary_size, head_size)]


def reorder_rows(weight: torch.Tensor, order: list[int]) -> torch.Tensor:
    """Reorder the rows within every consecutive block of `len(order)` rows."""
    return weight.unflatten(0, (-1, len(order)))[:, order].flatten(0, 1).contiguous()


def reorder_rotary(
    weight: torch.Tensor, change: RotaryChange, head_size: int, rotary_size: int | None = None
) -> torch.Tensor:
    """Reorder the features of a query or key projection for the other rotary layout.

    "interleaved", used by Meta's LLaMA files and GPT-J, rotates neighbouring features together. "halves", used by
    transformers, rotates features half a head apart. Attention is unchanged if both projections and the rotation
    change together.

    Args:
        weight: The weight or bias of the projection, all heads stacked along the first dimension.
        change: The direction of the change.
        head_size: Features per head.
        rotary_size: How many features of a head are rotated; all by default.

    Returns:
        A reordered copy.

    Raises:
        PosEncError: If the sizes or the change are invalid.

    Example:
        >>> key = reorder_rotary(attention.k_proj.weight, "interleaved_to_halves", head_size=128)
    """
    return reorder_rows(weight, rotary_feature_order(change, head_size, rotary_size))


def extend_table(weight: torch.Tensor, num_positions: int, method: TableExtension) -> torch.Tensor:
    """Extend a learned position table, for instance to save it in a stock checkpoint.

    The scheme `{"type": "learned", "max_positions": ..., "extend": ...}` computes the same rows without storing them.

    Args:
        weight: The table, one row per position.
        num_positions: Rows of the new table.
        method: "interpolate", "tile" or "hierarchical".

    Returns:
        The extended table.

    Raises:
        PosEncError: If the method is unknown or cannot reach that many positions.

    Example:
        >>> table = extend_table(model.transformer.wpe.weight, 2048, "interpolate")
    """
    import torch

    from ..schemes import extended_rows

    if method not in get_args(TableExtension):
        raise PosEncError(f"Unknown method {method!r}; expected one of {', '.join(get_args(TableExtension))}")
    if num_positions < len(weight) or (method == "hierarchical" and num_positions > len(weight) ** 2):
        raise PosEncError(f"Cannot extend a table of {len(weight)} positions to {num_positions} by {method!r}")
    return extended_rows(weight, torch.arange(num_positions, device=weight.device), method, num_positions)
