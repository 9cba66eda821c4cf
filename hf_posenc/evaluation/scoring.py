"""What a model predicts at some places of its input, a few places at a time: all logits at once would not fit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from ..model_types import STOCK_TYPES, VARIANT_PREFIX
from .halt import Halt, halting

PLACES_AT_A_TIME = 1024
WITH_TABLE = ("bert", "gpt2")
"""Stock models that end with their position table, with an index error: on a GPU, one that no process survives."""


def rows_at_once(batch_tokens: int, length: int) -> int:
    return max(batch_tokens // length, 1)


def end_of(model: Any) -> int | None:
    """The length that a stock model with a table ends at. Variants say so themselves."""
    config = model.config
    if config.model_type in WITH_TABLE and getattr(config, "position_scheme", None) is None:
        return config.max_position_embeddings
    return None


@torch.no_grad()
def states(model: Any, ids_BN: torch.Tensor) -> torch.Tensor:
    """The last hidden states, (B, N, E). Raises Halt where the model does not read that far."""
    end = end_of(model)
    if end is not None and ids_BN.shape[1] > end:
        raise Halt(
            f"the position table of this stock {model.config.model_type} ends at {end} tokens: give the model a "
            "position_scheme that goes on, such as rope, alibi or t5",
            refused=True,
        )
    with halting():
        return model.base_model(ids_BN, use_cache=False).last_hidden_state


@torch.no_grad()
def predictions(model: Any, ids_BN: torch.Tensor, wanted_BN: torch.Tensor, causal: bool) -> Iterator[torch.Tensor]:
    """Log-probabilities over the vocabulary, (places, V), for the wanted tokens, in order, some places at a time.

    A causal model predicts a token from those before it: its first one cannot be wanted.
    """
    if causal and bool(wanted_BN[:, 0].any()):
        raise ValueError("a causal model does not predict the first token of its input")
    places_BN = wanted_BN.roll(-1, 1) if causal else wanted_BN
    states_PE = states(model, ids_BN)[places_BN]
    head = head_of(model)
    for part_PE in states_PE.split(PLACES_AT_A_TIME):
        with halting():
            found_PV = head(part_PE).float().log_softmax(-1)
        if bool(found_PV.isnan().any()):
            raise Halt(f"what it predicts at {ids_BN.shape[1]} tokens are not numbers (NaN)")
        yield found_PV


def losses(
    model: Any, ids_BN: torch.Tensor, targets_BN: torch.Tensor, wanted_BN: torch.Tensor, causal: bool
) -> torch.Tensor:
    """Nats for each wanted target, (B, N); 0 elsewhere. In float64, to be summed."""
    targets_P = targets_BN[wanted_BN]
    found, done = [], 0
    for part_PV in predictions(model, ids_BN, wanted_BN, causal):
        own_P = targets_P[done : done + len(part_PV)]
        found.append(-part_PV.gather(-1, own_P[:, None])[:, 0].double())
        done += len(part_PV)
    result_BN = torch.zeros(ids_BN.shape, dtype=torch.float64, device=ids_BN.device)
    result_BN[wanted_BN] = torch.cat(found) if found else result_BN.new_zeros(0)
    return result_BN.cpu()


def head_of(model: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    """What turns hidden states into logits: in BERT a small network, in the others one matrix."""
    kind = model.config.model_type.removeprefix(VARIANT_PREFIX)
    found = getattr(model, "cls" if kind == "bert" else "lm_head", None)
    if kind not in STOCK_TYPES or not isinstance(found, nn.Module):
        raise ValueError(
            f"{type(model).__name__} has no head here that predicts tokens: load one of {sorted(STOCK_TYPES)} for "
            "causal or masked language modelling"
        )
    return found.predictions if kind == "bert" else found  # type: ignore[return-value]


def longest_that_works(model: Any, length: int) -> int | None:
    """The length that a model ends at, below one that it refuses, by halving. None if it does not refuse that."""
    device = next(model.parameters()).device

    def works(tokens: int) -> bool:
        try:
            states(model, torch.ones(1, tokens, dtype=torch.long, device=device))
        except Halt as halt:
            return not halt.refused  # no memory for it is not the model's end
        return True

    if works(length):
        return None
    good, bad = 0, length
    while bad - good > 1:
        middle = (good + bad) // 2
        good, bad = (middle, bad) if works(middle) else (good, middle)
    return good
