"""Let a teacher read rows that are longer than it can read at once, in overlapping windows."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch

POSITION_IDS, ATTENTION_MASK, INPUT_IDS = "position_ids", "attention_mask", "input_ids"


@dataclasses.dataclass(frozen=True)
class Window:
    """A window of a row, and the tokens whose outputs are taken from it. All are slots of the row.

    Attributes:
        start: First token that is read.
        stop: Where reading ends.
        keep_from: First token whose output is kept.
        keep_to: Where keeping ends.
    """

    start: int
    stop: int
    keep_from: int
    keep_to: int

    @property
    def kept(self) -> slice:
        """The tokens whose outputs are kept, as slots of the window."""
        return slice(self.keep_from - self.start, self.keep_to - self.start)


@dataclasses.dataclass(frozen=True)
class SpecialTokens:
    """The tokens that begin and end every row of an encoder, such as [CLS] and [SEP]; None if there are none."""

    first: int | None = None
    last: int | None = None


def plan_windows(num_tokens: int, size: int, causal: bool) -> list[Window]:
    """Windows that overlap by half, so that each token is read with at least half a window of context.

    The output for a token is taken from the window that gives it the most context: as many tokens before it as possible
    in a causal model, the same number on both sides in others.

    Args:
        num_tokens: Length of the rows.
        size: The most tokens that the model can read.
        causal: Whether tokens see only those before them.

    Returns:
        The windows in order; the tokens that they keep follow each other without gaps. A single one if rows fit.
    """
    stride = max(size // 2, 1)
    last_start = max(num_tokens - size, 0)
    starts = [*range(0, last_start, stride), last_start]
    stops = [min(start + size, num_tokens) for start in starts]
    borders = [
        stop if causal else (stop + next_start) // 2 for stop, next_start in zip(stops[:-1], starts[1:], strict=True)
    ]
    return [
        Window(start, stop, keep_from, keep_to)
        for start, stop, keep_from, keep_to in zip(starts, stops, [0, *borders], [*borders, num_tokens], strict=True)
    ]


def window_inputs(
    inputs: Mapping[str, torch.Tensor], window: Window, special: SpecialTokens, first_position: int = 0
) -> dict[str, torch.Tensor]:
    """The inputs of one window.

    A window that begins inside a row begins with its first special token, and one that ends inside a row ends with its
    last, in place of tokens whose outputs are not kept. Positions begin anew.

    Args:
        inputs: The model inputs of the rows.
        window: The window.
        special: The tokens that begin and end every row.
        first_position: What the model's `position_ids` call position 0.

    Returns:
        Inputs of the window's length.
    """
    shape = inputs[INPUT_IDS].shape
    selected = {
        name: value[:, window.start : window.stop].clone() if value.shape[:2] == shape else value
        for name, value in inputs.items()
    }
    input_ids_BN, mask_BN = selected[INPUT_IDS], selected.get(ATTENTION_MASK)
    if special.first is not None and window.keep_from > window.start:
        input_ids_BN[:, 0] = special.first
    if special.last is not None and window.keep_to < window.stop:
        input_ids_BN[:, -1] = special.last
    if mask_BN is not None:
        mask_BN[~mask_BN.bool().any(-1)] = 1  # a window of padding only: something must be visible
    if POSITION_IDS in selected:
        positions_BN = selected[POSITION_IDS]
        follows_BN = positions_BN[:, 1:] == positions_BN[:, :-1] + 1
        # Only the document that the window begins in has lost its beginning.
        cut_BN = torch.cat([torch.ones_like(follows_BN[:, :1]), follows_BN.cumprod(-1).bool()], dim=-1)
        positions_BN -= torch.where(cut_BN, positions_BN[:, :1] - first_position, 0)
    return selected
