"""Tensor parallelism: the heads of a layer are divided among processes, but scheme parameters are whole on each."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..errors import PosEncError
from ..schemes import Scheme


def check_all_heads(query_BHQD: torch.Tensor, schemes: Sequence[Scheme]) -> None:
    """Raise PosEncError if this process has only some of the heads that a scheme was built for."""
    for scheme in schemes:
        if query_BHQD.shape[1] != scheme.shape.num_heads:
            raise PosEncError(
                f"This process has {query_BHQD.shape[1]} of {scheme.shape.num_heads} attention heads (tensor "
                f"parallelism), but the position scheme {scheme.name!r} adds to the scores of all of them: load the "
                "model without tp_plan, or use a scheme that does not act on the scores (rope, xpos, learned, "
                "sinusoidal, none)"
            )
