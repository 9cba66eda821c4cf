"""What is looked at: the schemes inside of a model, stock or variant.

All numbers of this package are read off the scheme modules of such a model, at the seams that the model itself calls.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ..patches.architecture import Architecture
from ..patches.live_models import ARCHITECTURES, restore, retrofit
from ..patches.variants import PosEncBaseModel, PosEncModel
from ..schemes.base import Scheme
from ..schemes.inputs import Positions


def own_scheme(architecture: Architecture) -> str:
    """The name of the scheme that computes what the stock architecture does, to the bit."""
    return "learned" if architecture.table else "rope"


def architecture_of(model: nn.Module) -> Architecture:
    """Of a model, stock or variant, with or without a head."""
    found = next((known for known in ARCHITECTURES.values() if isinstance(model, known.family)), None)
    if found is None:
        raise ValueError(
            f"{type(model).__name__} is not a model that hf_posenc knows; it takes models of {sorted(ARCHITECTURES)} "
            "(unwrap a compiled, parallel or PEFT model first)"
        )
    return found


def base_of(model: nn.Module) -> Any:
    """The model without its head."""
    base = architecture_of(model).base
    return next(module for module in model.modules() if isinstance(module, base))


@contextmanager
def positioned(model: nn.Module) -> Iterator[Any]:
    """The base model with its schemes. A stock model carries its own encoding as one while this lasts, to the bit."""
    architecture = architecture_of(model)
    stock = not isinstance(model, PosEncModel)
    with evaluating(model), torch.no_grad():
        if stock:
            retrofit(model, own_scheme(architecture))
        try:
            yield next(module for module in model.modules() if isinstance(module, PosEncBaseModel))
        finally:
            if stock:
                restore(model)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """The model without dropout, while this lasts; after it, each of its modules in the mode that it was in."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def positions_of(base: Any, length: int) -> Positions:
    """Where the tokens of one row of this length stand, with what each scheme prepares for them."""
    if length < 1:
        raise ValueError(f"length must be at least 1, got {length}")
    device = base.get_input_embeddings().weight.device
    return base.prepare_inputs({"input_ids": torch.zeros(1, length, dtype=torch.long, device=device)}).positions


def names_of(base: Any) -> str:
    """The schemes of a model by name, as a title."""
    return " + ".join(scheme.name for scheme in base.position_scheme)


def schemes_with(base: Any, seam: str, what: str, instead: str) -> list[tuple[int, Scheme]]:
    """The schemes that act at a seam, with their places; where none does, a ValueError that says where to look."""
    found = [(place, scheme) for place, scheme in enumerate(base.position_scheme) if scheme.acts_at(seam)]
    if not found:
        raise ValueError(f"{names_of(base)} has no {what}: {instead}")
    return found


def refuse_foreign(base: Any, ids: torch.Tensor) -> None:
    """Raise ValueError for ids that the model has no words for: torch raises an IndexError, or on a GPU dies."""
    known, most = base.get_input_embeddings().weight.shape[0], int(ids.max())
    if most >= known or int(ids.min()) < 0:
        raise ValueError(
            f"token {most} is not among the {known} words of this {type(base).__name__}: models are looked at on the "
            "same tokens, so they must have one tokenizer"
        )


def refuse_layer(base: Any, layer: int) -> None:
    count = len(base.active_schemes)
    if not 0 <= layer < count:
        raise ValueError(f"there is no layer {layer}: the model has layers 0 to {count - 1}")
