"""A warm start: a new scheme fitted to the attention of the encoding that it replaces, before any training.

A model at the start of a handover is the stock model still, with the new schemes in it. It runs on some text, and what
enters each of its attentions is split into content and position: a rotation is undone; of a table, whatever the states
at a position have in common is taken for the position's. From the content alone, each layer's new terms are then
fitted so that its attention weights come as near as they can to those of the old encoding.

Shape legend: B batch, N tokens, E width of the model, H heads, G heads of keys, D width of a head.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from typing import Any

import torch
from torch import nn
from tqdm.auto import tqdm

from ..attention.function import PosEncAttention, apply_rotation, schemes_at, score_terms
from ..attention.materialize import materialize
from ..patches.attach import share_out
from ..patches.handing import bases_of, schedule_in
from ..schemes.inputs import Content, Positions
from .parameters import is_of_scheme

STEPS, ROWS, RATE, PROJECTION_RATE = 100, 2, 0.05, 5e-3
NARROW = 64
"""A width up to which projections are fitted at that rate, and beyond which it falls with the root of the width."""


@dataclasses.dataclass(frozen=True)
class Fit:
    """How far the attention of a model is from that of its old encoding, in nats a query: before and after."""

    before: float
    after: float


@dataclasses.dataclass(frozen=True)
class Attended:
    """One layer: its attention, the same as it was, and the states that enter it under the old encoding."""

    module: Any
    old: Any
    states_BNE: torch.Tensor

    def content_BNE(self, base: Any) -> torch.Tensor:
        """Of a table, without what the states at a position have in common beyond what all have."""
        states = self.states_BNE
        if base.architecture.table is None:
            return states
        return states - (states.mean(0, keepdim=True) - states.mean((0, 1), keepdim=True))

    @torch.no_grad()
    def weights_BHNN(self, base: Any, posenc: Positions, visible: torch.Tensor) -> torch.Tensor:
        query, key = _by_head(self.old, self.states_BNE, base)
        turns = _old_turns(base, posenc)
        logits = _product(apply_rotation(query, turns, False), apply_rotation(key, turns, True))
        return logits.masked_fill(~visible, float("-inf")).softmax(-1)


def fit(
    model: nn.Module,
    ids: torch.Tensor,
    *,
    projections: bool = False,
    steps: int = STEPS,
    rows: int = ROWS,
    rate: float = RATE,
    projection_rate: float | None = None,
    progress: bool = False,
) -> Fit:
    """Fit the new schemes of a model at the start of its handover to the old encoding, on token ids, (B, N).

    Trains the parameters of the schemes, all layers at once and each by itself, on `rows` of the text at each step;
    with `projections`, those of queries and keys as well, which schemes without parameters need. Without them, the
    model still computes what it did: what was fitted shows as the handover goes on, or at once with
    `Handover.finish()`. With them it does not, and `finish()` is what comes next.
    """
    schedule = schedule_in(model)
    if schedule is None or schedule.step:
        raise ValueError("fit needs a model at the start of a handover: the old encoding is what it is fitted to")
    _refuse_text(ids, rows, steps)
    was_training = model.training
    model.eval()
    try:
        results = []
        for base in bases_of(model):
            text = _Text(base, ids, rows)
            before = text.measured()
            slow = _projection_rate(base.config.hidden_size) if projection_rate is None else projection_rate
            groups = _groups(base, projections, rate, slow)
            if groups:
                _descend(text, groups, steps, progress)
            results.append(Fit(before, text.measured()))
    finally:
        model.train(was_training)
    count = len(results)
    return Fit(sum(found.before for found in results) / count, sum(found.after for found in results) / count)


def _refuse_text(ids: Any, rows: int, steps: int) -> None:
    shape = tuple(ids.shape) if isinstance(ids, torch.Tensor) and ids.dtype in (torch.long, torch.int) else None
    if shape is None or len(shape) != 2 or 0 in shape:
        found = type(ids).__name__ if not isinstance(ids, torch.Tensor) else f"{ids.dtype} of shape {tuple(ids.shape)}"
        raise ValueError(f"fit needs token ids, a tensor of integers with rows as long as each other; got {found}")
    if rows < 1 or steps < 0:
        raise ValueError(f"fit takes steps (of 0 it measures only) of 1 row or more; got steps={steps}, rows={rows}")


def _projection_rate(width: int) -> float:
    return PROJECTION_RATE * min(1.0, math.sqrt(NARROW / width))


class _Text:
    """Some rows at a time, with the states that they have in the model as it was. A rest of fewer rows is left out."""

    def __init__(self, base: Any, ids: torch.Tensor, rows: int) -> None:
        if base.architecture.table is not None and min(rows, len(ids)) < 2:
            raise ValueError(
                "what a position table does is found in what several rows have in common: fit on 2 rows or more, and "
                f"as many at a time; got {len(ids)}, {rows} at a time"
            )
        self.base = base
        self.old = copy.deepcopy(base).requires_grad_(False)
        self.parts = ids[: len(ids) // rows * rows or len(ids)].split(rows)

    def divergence(self, number: int) -> torch.Tensor:
        base = self.base
        schemes, count = list(base.position_scheme), base.num_new_schemes
        ids = self.parts[number % len(self.parts)].to(base.device)
        with torch.no_grad():
            layers = _attended(base, self.old, ids)
            before = self.old.prepare_inputs({"input_ids": ids}).positions
        share_out(schemes, count, 1.0)
        try:
            return _divergence(base, layers, ids, before)
        finally:
            share_out(schemes, count, 0.0)

    def measured(self) -> float:
        with torch.no_grad():
            return self.divergence(0).item()


def _attentions(base: Any) -> list[Any]:
    return [module for module in base.modules() if isinstance(module, PosEncAttention)]


def _groups(base: Any, projections: bool, rate: float, slow: float) -> list[dict[str, Any]]:
    own = [parameter for name, parameter in base.named_parameters() if is_of_scheme(name)]
    rest = [
        parameter
        for module in _attentions(base)
        for name, parameter in module.named_parameters()
        if projections and not is_of_scheme(name)
    ]
    groups = [{"params": own, "lr": rate}, {"params": rest, "lr": slow}]
    return [group for group in groups if group["params"]]


def _descend(text: _Text, groups: list[dict[str, Any]], steps: int, progress: bool) -> None:
    """Adam on the divergence. If that makes it worse, everything is put back. What gets no gradient does not change."""
    parameters = [parameter for group in groups for parameter in group["params"]]
    wanted = [parameter.requires_grad for parameter in parameters]
    kept, start = [parameter.detach().clone() for parameter in parameters], text.measured()
    with torch.enable_grad():
        for parameter in parameters:
            parameter.requires_grad_(True)
        optimizer = torch.optim.Adam(groups)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, max(steps, 1))
        for step in tqdm(range(steps), unit="step", disable=not progress):
            loss = text.divergence(step)
            if not loss.requires_grad:
                break
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    worse = not text.measured() <= start
    with torch.no_grad():
        for parameter, value, trained in zip(parameters, kept, wanted, strict=True):
            if worse:
                parameter.copy_(value)
            parameter.requires_grad_(trained)
            parameter.grad = None


def _attended(base: Any, old: Any, ids: torch.Tensor) -> list[Attended]:
    """What enters each attention of the model as it was."""
    states: dict[int, torch.Tensor] = {}

    def before(module: Any, args: Any, kwargs: Any) -> None:
        states[id(module)] = args[0] if args else kwargs["hidden_states"]

    modules = _attentions(old)
    hooks = [module.register_forward_pre_hook(before, with_kwargs=True) for module in modules]
    try:
        old(ids)
    finally:
        for hook in hooks:
            hook.remove()
    return [Attended(new, known, states[id(known)]) for new, known in zip(_attentions(base), modules, strict=True)]


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


def _divergence(base: Any, layers: list[Attended], ids: torch.Tensor, before: Positions) -> torch.Tensor:
    """Kullback-Leibler from the old weights to the new ones: the mean over layers, heads and queries.

    `before`: the positions as the old encoding prepared them.
    """
    posenc = base.prepare_inputs({"input_ids": ids}).positions
    visible = _visible(ids, posenc)
    total = torch.zeros((), device=ids.device)
    for layer in layers:
        module = layer.module
        plain, key = _by_head(module, layer.content_BNE(base), base)
        turns = [turn for turn in schemes_at("rotate", module, posenc) if turn[0].strength]
        query, key = apply_rotation(plain, turns, False), apply_rotation(key, turns, True)
        content = Content(
            plain,
            query,
            key,
            plain.shape[-1] ** -0.5,
            lambda: visible[None, None],
            lambda states, module=module, plain=plain: module.project_rows(states, plain),  # type: ignore[misc]
        )
        terms = score_terms([found for found in schemes_at("score", module, posenc) if found[0].strength], content)
        for scheme, _, part in schemes_at("content_scale", module, posenc):
            query = query * scheme("content_scale", part)[:, None, None]
        logits = _product(query, key)
        for term in terms:
            logits = logits + materialize(term, posenc, content)
        new = logits.masked_fill(~visible, torch.finfo(logits.dtype).min).log_softmax(-1)
        old = layer.weights_BHNN(base, before, visible)
        total = total + torch.where(old > 0, old * (old.clamp(min=1e-30).log() - new), 0.0).sum(-1).mean()
    return total / len(layers)
