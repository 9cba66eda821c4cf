"""A warm start: a new scheme fitted to the attention of the encoding that it replaces, before any training.

A model at the start of a handover is the stock model still, with the new schemes in it. It runs on some text, and what
enters each of its attentions is split into content and position: a rotation is undone; of a table, whatever the states
at a position have in common is taken for the position's. From the content alone, each layer's new terms are then
fitted so that its attention weights come as near as they can to those of the old encoding.

Shape legend: B batch, N tokens, E width of the model, H heads, G heads of keys, D width of a head.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import nn

from ..attention import PositionedAttention, schemes_at, score_terms, turned
from ..engine.scores import written_out
from ..patches.attach import share_out
from ..patches.handing import bases_of, schedule_in
from ..scheme import Content, Positions
from .parameters import is_of_scheme

STEPS, RATE, PROJECTION_RATE = 100, 0.05, 2e-3


@dataclasses.dataclass(frozen=True)
class Fit:
    """How far the attention of a model is from that of its old encoding, in nats a query: before and after."""

    before: float
    after: float


@dataclasses.dataclass(frozen=True)
class Attended:
    """One layer: its attention, the content that enters it, and the weights that it had under the old encoding."""

    module: Any
    content_BNE: torch.Tensor
    weights_BHNN: torch.Tensor


def fit(
    model: nn.Module,
    ids: torch.Tensor,
    *,
    projections: bool = False,
    steps: int = STEPS,
    rate: float = RATE,
    projection_rate: float = PROJECTION_RATE,
) -> Fit:
    """Fit the new schemes of a model at the start of its handover to the old encoding, on token ids, (B, N).

    Trains the parameters of the schemes, layer by layer and all layers at once; with `projections`, those of queries
    and keys as well, which schemes without parameters need. The model still computes what it did: what was fitted
    shows as the handover goes on, or at once with `Handover.finish()`.
    """
    schedule = schedule_in(model)
    if schedule is None or schedule.step:
        raise ValueError("fit needs a model at the start of a handover: the old encoding is what it is fitted to")
    if projections and any(
        scheme.acts_at("embed") and scheme.rewrites_words for base in bases_of(model) for scheme in base.position_scheme
    ):
        raise ValueError("a scheme that mixes positions into words cannot be fitted: its positions are in the states")
    was_training = model.training
    model.eval()
    results = [_fit_base(base, ids, projections, steps, rate, projection_rate) for base in bases_of(model)]
    model.train(was_training)
    return results[0]


def _fit_base(base: Any, ids: torch.Tensor, projections: bool, steps: int, rate: float, slow: float) -> Fit:
    schemes, count = list(base.position_scheme), base.num_new_schemes
    with torch.no_grad():
        layers = _attended(base, ids)
    share_out(schemes, count, 1.0)
    try:
        with torch.no_grad():
            before = _divergence(base, layers, ids).item()
        groups = _groups(base, projections, rate, slow)
        after = _descend(base, layers, ids, groups, steps) if groups else before
    finally:
        share_out(schemes, count, 0.0)
    return Fit(before, after)


def _groups(base: Any, projections: bool, rate: float, slow: float) -> list[dict[str, Any]]:
    own = [parameter for name, parameter in base.named_parameters() if is_of_scheme(name)]
    attentions = [module for module in base.modules() if isinstance(module, PositionedAttention)]
    rest = [
        parameter
        for module in attentions
        for name, parameter in module.named_parameters()
        if projections and not is_of_scheme(name)
    ]
    groups = [{"params": own, "lr": rate}, {"params": rest, "lr": slow}]
    return [group for group in groups if group["params"]]


def _descend(base: Any, layers: list[Attended], ids: torch.Tensor, groups: list[dict[str, Any]], steps: int) -> float:
    """Adam on the divergence; the best point on the way is kept. Nothing is changed that gets no gradient."""
    parameters = [parameter for group in groups for parameter in group["params"]]
    wanted = [parameter.requires_grad for parameter in parameters]
    best, kept = float("inf"), [parameter.detach().clone() for parameter in parameters]
    with torch.enable_grad():
        for parameter in parameters:
            parameter.requires_grad_(True)
        optimizer = torch.optim.Adam(groups)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
        for step in range(steps + 1):
            loss = _divergence(base, layers, ids)
            if not loss.requires_grad:
                break
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
    return min(best, loss.item())


def _attended(base: Any, ids: torch.Tensor) -> list[Attended]:
    """What happens in each attention of the model while it computes as it did before."""
    modules = [module for module in base.modules() if isinstance(module, PositionedAttention)]
    states: dict[int, torch.Tensor] = {}

    def before(module: Any, args: Any, kwargs: Any) -> None:
        states[module.layer_idx] = args[0] if args else kwargs["hidden_states"]

    hooks = [module.register_forward_pre_hook(before, with_kwargs=True) for module in modules]
    try:
        base(ids)
    finally:
        for hook in hooks:
            hook.remove()
    posenc = base.place({"input_ids": ids}).positions
    found = []
    for module in modules:
        own = states[module.layer_idx]
        query, key = _by_head(module, own, base)
        turns = _old_turns(base, posenc)
        logits = _product(turned(query, turns, False), turned(key, turns, True))
        content = own
        if base.architecture.table:  # what the states at a position have in common, beyond what all have
            content = own - (own.mean(0, keepdim=True) - own.mean((0, 1), keepdim=True))
        weights = logits.masked_fill(~_visible(ids, posenc), float("-inf")).softmax(-1)
        found.append(Attended(module, content, weights))
    return found


def _old_turns(base: Any, posenc: Positions) -> list[tuple[Any, Any, Any]]:
    places = range(base.num_new_schemes, len(posenc.schemes))
    turning = [place for place in places if posenc.schemes[place].acts_at("rotate")]
    return [(posenc.schemes[place], posenc.prepared[place], None) for place in turning]


def _by_head(module: Any, states_BNE: torch.Tensor, base: Any) -> list[torch.Tensor]:
    size = base.position_scheme[0].shape.head_size
    return [found.unflatten(-1, (-1, size)).transpose(1, 2) for found in module.projected(states_BNE)]


def _product(query_BHND: torch.Tensor, key_BGND: torch.Tensor) -> torch.Tensor:
    groups = query_BHND.shape[1] // key_BGND.shape[1]
    key_BHND = key_BGND.repeat_interleave(groups, dim=1)
    return query_BHND.matmul(key_BHND.transpose(-1, -2)) * query_BHND.shape[-1] ** -0.5


def _visible(ids: torch.Tensor, posenc: Positions) -> torch.Tensor:
    everything = torch.ones(ids.shape[-1], ids.shape[-1], dtype=torch.bool, device=ids.device)
    return everything.tril() if posenc.causal else everything


def _divergence(base: Any, layers: list[Attended], ids: torch.Tensor) -> torch.Tensor:
    """Kullback-Leibler from the old weights to the new ones: the mean over layers, heads and queries."""
    posenc = base.place({"input_ids": ids}).positions
    visible = _visible(ids, posenc)
    total = torch.zeros((), device=ids.device)
    for layer in layers:
        module = layer.module
        plain, key = _by_head(module, layer.content_BNE, base)
        turns = [turn for turn in schemes_at("rotate", module, posenc) if turn[0].strength]
        query, key = turned(plain, turns, False), turned(key, turns, True)
        content = Content(
            plain,
            query,
            key,
            plain.shape[-1] ** -0.5,
            lambda: visible[None, None],
            lambda states, module=module, plain=plain: module.rows_by_head(states, plain),  # type: ignore[misc]
        )
        terms = score_terms([found for found in schemes_at("score", module, posenc) if found[0].strength], content)
        for scheme, _, part in schemes_at("content_scale", module, posenc):
            query = query * scheme("content_scale", part)[:, None, None]
        logits = _product(query, key)
        for term in terms:
            logits = logits + written_out(term, posenc, content)
        new = logits.masked_fill(~visible, torch.finfo(logits.dtype).min).log_softmax(-1)
        old = layer.weights_BHNN
        total = total + torch.where(old > 0, old * (old.clamp(min=1e-30).log() - new), 0.0).sum(-1).mean()
    return total / len(layers)
