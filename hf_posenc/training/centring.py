"""What a table adds at all positions alike is no position: it is kept when the table goes."""

from __future__ import annotations

import torch
from torch import nn

from ..patches.handing import bases_of, table_that_gives_way


@torch.no_grad()
def centre_tables(model: nn.Module, length: int) -> None:
    """Of a model at the start of a handover, move the mean of a table's first rows to embeddings that stay.

    The model computes what it did. Where no embedding can take it (GPT-2), it goes with the table.
    """
    for base in bases_of(model):
        table = table_that_gives_way(base)
        if table is not None and base.architecture.constant is not None:
            (stays,) = base.get_submodule(base.architecture.constant).parameters()
            mean = table[:length].mean(0)
            table.sub_(mean)
            stays.add_(mean)
