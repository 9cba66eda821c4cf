"""Models on their way from the stock encoding to another, for the tests of handing over."""

from __future__ import annotations

from typing import Any

import tiny
import torch

from hf_posenc.schedule import with_handover

STEPS = 4


def logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(ids, use_cache=False).logits


def handing(architecture: str, scheme: Any, dtype: torch.dtype = torch.float64, **changes: Any) -> Any:
    return tiny.model(architecture, with_handover(scheme, STEPS), dtype, **changes)
