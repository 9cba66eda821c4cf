"""A warm start: the parameters of a new scheme fitted to what the old encoding added to the attention logits.

The old model runs on some text. What enters each of its attentions is split into content and position: a rotation is
undone; of a table, whatever the states at a position have in common is taken for the position's. The difference that
this makes to the logits is what the new scheme should add, and its parameters are fitted to that by least squares,
where each pair of tokens counts as much as the old model looked at it.

Shape legend: B batch, N tokens, E width of the model, H heads, D width of a head.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import nn

from ..attention import PositionedAttention, schemes_at, score_terms
from ..engine.scores import written_out
from ..patches.handing import bases_of
from ..rotation import turn
from ..scheme import Content, Positions
from ..schemes.rope import Rope, RopeOptions
from .parameters import is_of_scheme

STEPS, RATE = 100, 0.05


@dataclasses.dataclass(frozen=True)
class LayerTarget:
    """Of one layer: content of queries and keys, the old model's logits and its weights."""

    query_BHND: torch.Tensor
    key_BGND: torch.Tensor
    logits_BHNN: torch.Tensor
    weights_BHNN: torch.Tensor


def fit(new: nn.Module, old: nn.Module, ids: torch.Tensor, steps: int = STEPS, rate: float = RATE) -> float:
    """Fit the schemes' parameters of a variant to the stock model that it was made of, on token ids, (B, N).

    Returns the share of what the old encoding added to the logits that the new one now gives: 1 is all of it, 0 none.
    Parameters of schemes that add nothing to logits stay as they are.
    """
    (base,) = bases_of(new)
    parameters = [parameter for name, parameter in new.named_parameters() if is_of_scheme(name)]
    modules = sorted(
        (module for module in base.modules() if isinstance(module, PositionedAttention)),
        key=lambda module: module.layer_idx,
    )
    if not parameters or not any(scheme.acts_at("score") for scheme in base.position_scheme):
        return 0.0
    with torch.no_grad():
        targets = _targets(modules, base, old, ids)
        before = _squares(modules, base, targets, ids, silent=True)
    wanted = [parameter.requires_grad for parameter in parameters]
    best, kept = float("inf"), [parameter.detach().clone() for parameter in parameters]
    with torch.enable_grad():
        for parameter in parameters:
            parameter.requires_grad_(True)
        optimizer = torch.optim.Adam(parameters, lr=rate)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
        for step in range(steps + 1):
            loss = _squares(modules, base, targets, ids)
            if loss.item() < best:
                best, kept = loss.item(), [parameter.detach().clone() for parameter in parameters]
            if step < steps:
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                schedule.step()
    with torch.no_grad():
        for parameter, value, trained in zip(parameters, kept, wanted, strict=True):
            parameter.copy_(value)
            parameter.requires_grad_(trained)
            parameter.grad = None
    return 1 - best / max(before.item(), 1e-30)


def _targets(modules: list[Any], base: Any, old: Any, ids: torch.Tensor) -> list[LayerTarget]:
    rotary = base.architecture.rotary is not None
    posenc = base.place({"input_ids": ids}).positions
    angles = None
    if rotary:
        shape = base.architecture.shape(old.config)
        angles = Rope(RopeOptions(), shape).prepare(posenc)
    targets = []
    for module, states_BNE in zip(modules, _attended(base, old, ids), strict=True):
        content_BNE = states_BNE
        if not rotary:  # what the states at a position have in common, beyond what all have
            content_BNE = states_BNE - (states_BNE.mean(0, keepdim=True) - states_BNE.mean((0, 1), keepdim=True))
        query, key = _by_head(module, states_BNE, base)
        if angles is not None:
            query, key = (turn(of, angles.cosines, angles.turning, "halves") for of in (query, key))
        logits = _product(query, key)
        weights = logits.masked_fill(~_visible(logits, posenc), float("-inf")).softmax(-1)
        content_query, content_key = _by_head(module, content_BNE, base)
        targets.append(LayerTarget(content_query, content_key, logits, weights))
    return targets


def _attended(base: Any, old: Any, ids: torch.Tensor) -> list[torch.Tensor]:
    """What enters the self-attention of each layer of the old model."""
    states: list[torch.Tensor] = []

    def before(module: nn.Module, args: Any, kwargs: Any) -> None:
        states.append(args[0] if args else kwargs["hidden_states"])

    hooks = [
        module.register_forward_pre_hook(before, with_kwargs=True)
        for _, module in base.architecture.attentions(old.base_model)
    ]
    try:
        old(ids)
    finally:
        for hook in hooks:
            hook.remove()
    return states


def _by_head(module: Any, states_BNE: torch.Tensor, base: Any) -> list[torch.Tensor]:
    size = base.position_scheme[0].shape.head_size
    return [found.unflatten(-1, (-1, size)).transpose(1, 2) for found in module.projected(states_BNE)]


def _product(query_BHND: torch.Tensor, key_BGND: torch.Tensor) -> torch.Tensor:
    groups = query_BHND.shape[1] // key_BGND.shape[1]
    key_BHND = key_BGND.repeat_interleave(groups, dim=1)
    return query_BHND.matmul(key_BHND.transpose(-1, -2)) * query_BHND.shape[-1] ** -0.5


def _visible(logits: torch.Tensor, posenc: Positions) -> torch.Tensor:
    everything = torch.ones(logits.shape[-2:], dtype=torch.bool, device=logits.device)
    return everything.tril() if posenc.causal else everything


def _squares(
    modules: list[Any], base: Any, targets: list[LayerTarget], ids: torch.Tensor, silent: bool = False
) -> torch.Tensor:
    """Weighted squares between old and new logits, each query's own constant aside, which no softmax sees."""
    posenc = base.place({"input_ids": ids}).positions
    total = torch.zeros(())
    for module, target in zip(modules, targets, strict=True):
        query, key = target.query_BHND, target.key_BGND
        found = _product(query, key)
        if not silent:
            content = Content(
                query,
                query,
                key,
                query.shape[-1] ** -0.5,
                lambda found=found: _visible(found, posenc)[None, None],  # type: ignore[misc]
                lambda states, module=module, query=query: module.rows_by_head(states, query),  # type: ignore[misc]
            )
            for scheme, _, part in schemes_at("content_scale", module, posenc):
                found = found * scheme("content_scale", part)[:, None, None]
            for term in score_terms(schemes_at("score", module, posenc), content):
                found = found + written_out(term, posenc, content)
        off = target.logits_BHNN - found
        weights = target.weights_BHNN
        off = off - (off * weights).sum(-1, keepdim=True)
        total = total + (weights * off.square()).sum(-1).mean()
    return total / len(modules)
