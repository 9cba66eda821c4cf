"""The vectors of positions at the input embedding, and what mixing makes of them and of words."""

from __future__ import annotations

from typing import Any

import torch

from ..schemes.mixing import InputScheme
from .subjects import positions_of


def vectors_of(base: Any, scheme: Any, posenc: Any) -> torch.Tensor:
    """(1, N, P): a scheme's vectors, also where they are the architecture's own table, which it adds itself."""
    if not isinstance(scheme, InputScheme):
        raise ValueError(f"{scheme.name} puts positions into words, but gives no vector of a position by itself")
    if scheme.uses_stock_table() and posenc.table is None:
        return base.get_submodule(base.architecture.table)(posenc.queries_BQ)
    return scheme.position_embeddings(posenc)


def input_states(base: Any, ids: torch.Tensor) -> torch.Tensor:
    """(B, N, E): words with their positions in them, as they leave the schemes and before any norm of the model's."""
    inputs: dict[str, Any] = {"input_ids": ids.to(base.device)}
    posenc = base.prepare_inputs(inputs).positions
    states = inputs.get("inputs_embeds")
    if states is None:
        states = base.get_input_embeddings()(inputs["input_ids"])
    for scheme in base.position_scheme:
        if scheme.uses_stock_table() and posenc.table is None:
            states = states + vectors_of(base, scheme, posenc)
    return states.float().cpu()


def position_vectors(base: Any, length: int) -> torch.Tensor:
    """(N, P): of all schemes at the input together, where they are of one width; zeros where there is none."""
    posenc = positions_of(base, length)
    found = [vectors_of(base, scheme, posenc)[0].float() for scheme in base.position_scheme if scheme.acts_at("embed")]
    if not found:
        return torch.zeros(length, base.config.hidden_size)
    first = found[0].shape[-1]
    return torch.stack([vectors.expand(length, -1) for vectors in found if vectors.shape[-1] == first]).sum(0).cpu()
