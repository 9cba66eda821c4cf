"""How far a student's hidden states are from the teacher's, in a way that massive activations cannot dominate.

In large language models a few tokens, such as the first, have hidden states a hundred times larger than all others,
and a student with another position encoding may grow them at other tokens. So the error is measured channel by channel
in units of the teacher's ordinary tokens, the teacher's massive tokens are left out, and beyond an error of about 1 the
loss of a token only grows with its logarithm.

Shape legend: B batch, N tokens, E hidden size.
"""

from __future__ import annotations

import torch

MASSIVE_RATIO = 10.0
"""Tokens whose hidden states are this many times larger than the row's median are left out."""
SCALE_FLOOR = 0.1
"""Lower bound of a channel's mean square, relative to the median channel: short rows have channels close to zero."""


def hidden_state_distance(
    states_BNE: torch.Tensor, target_BNE: torch.Tensor, mask_BN: torch.Tensor | None = None
) -> torch.Tensor:
    """Robust relative squared error of one layer's hidden states.

    Scales are taken per row, so that the loss does not depend on how rows are split into batches.

    Args:
        states_BNE: The student's hidden states.
        target_BNE: The teacher's hidden states.
        mask_BN: 1 at tokens and 0 at padding.

    Returns:
        The mean over tokens: 0 for equal states, close to the relative squared error if it is small.
    """
    states_BNE, target_BNE = states_BNE.float(), target_BNE.detach().float()
    is_token_BN = torch.ones_like(target_BNE[..., 0], dtype=torch.bool) if mask_BN is None else mask_BN.bool()
    square_BNE = target_BNE.square()
    norm_BN = square_BNE.mean(-1)
    median_B1 = norm_BN.masked_fill(~is_token_BN, torch.nan).nanmedian(-1, keepdim=True).values
    is_ordinary_BN = is_token_BN & (norm_BN <= MASSIVE_RATIO**2 * median_B1)
    weights_BN1 = is_ordinary_BN[..., None].float()
    scale_B1E = (square_BNE * weights_BN1).sum(1, keepdim=True) / weights_BN1.sum(1, keepdim=True).clamp(min=1)
    floor_B11 = SCALE_FLOOR * scale_B1E.median(-1, keepdim=True).values
    scale_B1E = torch.maximum(scale_B1E, floor_B11).clamp(min=torch.finfo(torch.float32).eps ** 2)
    error_BN = ((states_BNE - target_BNE).square() / scale_B1E).mean(-1).log1p()
    # The mean over all tokens: the weight of a batch is its number of tokens, massive or not.
    return error_BN.masked_fill(~is_ordinary_BN, 0.0).sum() / is_token_BN.sum().clamp(min=1)
