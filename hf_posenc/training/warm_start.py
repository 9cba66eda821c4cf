"""Warm start: fit a variant to the attention of the stock model that it replaces, before any training.

The stock model runs on some text, and the hidden states that enter each attention layer are split into content and
position: a rotation acts after the projections, so the states are content already; a position table shows up as what
the states at one position have in common, so that mean is removed. Given the content alone, the variant's position
parameters are fitted layer by layer, so that its attention weights come as close as possible to the stock ones.

Shape legend: B batch, N tokens, E hidden size, H heads, G key heads, D head size.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import math
import operator
import statistics
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from tqdm.auto import tqdm
from transformers import PreTrainedModel

from ..attention import apply_rotation, materialize, scale_content, score_terms, visible_pairs
from ..checkpoints import is_scheme_parameter
from ..errors import PosEncError
from ..patches import PosEncAttention, PosEncBaseModel, architecture_of, base_models, retrofit
from ..patches.compat import attn_implementation
from ..schemes import Content, Positions

PROJECTION_LEARNING_RATE, REFERENCE_WIDTH = 5e-3, 64
"""Projections up to this width use this rate; for wider models it falls with the square root of the width."""


@dataclasses.dataclass(frozen=True)
class FitResult:
    """How far a variant's attention weights are from the stock ones: KL divergence in nats per query.

    Attributes:
        before: Divergence before fitting.
        after: Divergence after fitting.
    """

    before: float
    after: float


def fit(
    stock_model: PreTrainedModel,
    variant: PreTrainedModel,
    input_ids: torch.Tensor,
    *,
    projections: bool = False,
    steps: int = 100,
    rows: int = 2,
    learning_rate: float = 0.05,
    projection_learning_rate: float | None = None,
    progress: bool = False,
) -> FitResult:
    """Fit the position parameters of a variant to the attention weights of its stock model.

    All layers are fitted at once, each on its own. The stock model is left untouched, and so is the variant if
    fitting would make it worse.

    Args:
        stock_model: The model that the variant was made from.
        variant: The model with the new position scheme; fitted in place.
        input_ids: Text to fit on, token ids of shape (batch, length).
        projections: Also fit the query and key projections. Schemes without parameters need this.
        steps: Optimizer steps. With 0 the divergence is only measured.
        rows: Rows of `input_ids` per step.
        learning_rate: Learning rate of the scheme's parameters.
        projection_learning_rate: Learning rate of the projections; chosen by the model's width if None.
        progress: Show a progress bar.

    Returns:
        The divergence between the two models' attention weights before and after.

    Raises:
        PosEncError: If the models do not belong together or `input_ids` cannot be used.

    Example:
        >>> variant = AutoModelForCausalLM.from_pretrained(name, position_scheme="t5")
        >>> hf_posenc.fit(stock_model, variant, input_ids, projections=True)
    """
    if not isinstance(input_ids, torch.Tensor):
        raise PosEncError(f"input_ids must be a tensor of token ids, got {type(input_ids).__name__}")
    if input_ids.dtype not in (torch.long, torch.int) or input_ids.ndim != 2 or not input_ids.numel():
        tensor = f"{input_ids.dtype} of shape {tuple(input_ids.shape)}"
        raise PosEncError(f"input_ids must be integers of shape (batch, length), got {tensor}")
    if rows < 1 or steps < 0:
        raise PosEncError(f"steps must be at least 0 and rows at least 1, got steps={steps} and rows={rows}")
    was_training = variant.training
    variant.eval()
    results = []
    try:
        for stock_base, base in _paired_bases(stock_model, variant):
            divergence = _AttentionDivergence(stock_base, base, input_ids, rows)
            groups = _parameter_groups(base, projections, learning_rate, projection_learning_rate)
            results.append(_minimize(divergence, groups, steps, progress))
    finally:
        variant.train(was_training)
    return FitResult(
        before=statistics.fmean(result.before for result in results),
        after=statistics.fmean(result.after for result in results),
    )


@torch.no_grad()
def absorb_table_mean(stock_model: PreTrainedModel, variant: PreTrainedModel, length: int) -> None:
    """Keep what a dropped position table added at every position alike, by adding it to another embedding.

    Only architectures with a suitable embedding do this, such as BERT's token types. For others the mean is lost.

    Args:
        stock_model: The model that still has its position table.
        variant: The model made from it; changed in place.
        length: How many rows of the table to average: the number of positions that training uses.
    """
    for stock_base, base in _paired_bases(stock_model, variant):
        architecture = base.architecture
        if architecture.constant is not None and _drops_table(base):
            (embedding,) = base.get_submodule(architecture.constant).parameters()
            (table,) = stock_base.get_submodule(architecture.table).parameters()
            first_row = architecture.shape(stock_base.config).table_first_row
            embedding.add_(table[first_row : first_row + length].mean(0).to(embedding))


def _paired_bases(stock_model: PreTrainedModel, variant: PreTrainedModel) -> Iterable[tuple[PreTrainedModel, ...]]:
    stock_class = architecture_of(stock_model).base
    stock_bases = [module for module in stock_model.modules() if isinstance(module, stock_class)]
    bases = base_models(variant)
    if not bases:
        raise PosEncError(
            f"{type(variant).__name__} has no position scheme to fit: load it with from_pretrained(..., "
            "position_scheme=...) or change it with hf_posenc.retrofit"
        )
    sizes = operator.attrgetter("config.hidden_size", "config.num_hidden_layers", "config.num_attention_heads")
    if list(map(sizes, stock_bases)) != list(map(sizes, bases)):
        raise PosEncError(
            f"{type(stock_model).__name__} and {type(variant).__name__} have different sizes: pass the stock model "
            "that the variant was made from"
        )
    return zip(stock_bases, bases, strict=True)


def _drops_table(base: PreTrainedModel) -> bool:
    return base.architecture.table is not None and not any(s.uses_stock_table() for s in base.position_scheme)


def _parameter_groups(
    base: PreTrainedModel, projections: bool, learning_rate: float, projection_rate: float | None
) -> list[dict[str, Any]]:
    schemes = [parameter for name, parameter in base.named_parameters() if is_scheme_parameter(name)]
    groups: list[dict[str, Any]] = [{"params": schemes, "lr": learning_rate}]
    if projections:
        # Value and output projections get no gradient, so the optimizer leaves them alone.
        modules = nn.ModuleList(_attentions(base))
        weights = [parameter for name, parameter in modules.named_parameters() if not is_scheme_parameter(name)]
        default_rate = PROJECTION_LEARNING_RATE * min(1.0, math.sqrt(REFERENCE_WIDTH / base.config.hidden_size))
        groups.append({"params": weights, "lr": default_rate if projection_rate is None else projection_rate})
    return [group for group in groups if group["params"]]


def _minimize(divergence: _AttentionDivergence, groups: list[dict[str, Any]], steps: int, progress: bool) -> FitResult:
    """Adam with a cosine schedule; everything is put back if that made the divergence worse."""
    with torch.no_grad():
        before = divergence(0).item()
    if not groups or not steps:
        return FitResult(before, before)
    parameters = [parameter for group in groups for parameter in group["params"]]
    initial = [(parameter.detach().clone(), parameter.requires_grad) for parameter in parameters]
    with torch.enable_grad():
        for parameter in parameters:
            parameter.requires_grad_(True)
        optimizer = torch.optim.Adam(groups)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
        for step in tqdm(range(steps), desc="Fitting attention", unit="step", disable=not progress):
            loss = divergence(step)
            if not loss.requires_grad:  # the scheme has no parameters
                break
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
    with torch.no_grad():
        after = divergence(0).item()
        is_better = after <= before  # false for NaN
        for parameter, (value, requires_grad) in zip(parameters, initial, strict=True):
            if not is_better:
                parameter.copy_(value)
            parameter.requires_grad_(requires_grad)
            parameter.grad = None
    return FitResult(before, after if is_better else before)


class _AttentionDivergence:
    """KL divergence from the stock attention weights to the variant's, on a few rows of text at a time."""

    def __init__(self, stock_base: PreTrainedModel, base: PreTrainedModel, input_ids: torch.Tensor, rows: int) -> None:
        self.drops_table = _drops_table(base)
        if self.drops_table and min(rows, len(input_ids)) < 2:
            raise PosEncError(
                "The effect of a position table is estimated from what several rows have in common: fit on at least 2 "
                f"rows per step; got {len(input_ids)} rows, {rows} per step"
            )
        self.base, self.stock_base = base, _reference_copy(stock_base, base)
        self.batches = input_ids[: len(input_ids) // rows * rows or len(input_ids)].split(rows)  # drops a short rest

    def __call__(self, step: int) -> torch.Tensor:
        """The mean over layers, heads and queries."""
        input_ids = self.batches[step % len(self.batches)].to(self.base.device)
        targets = self._stock_attention(input_ids)
        positions = self.base.prepare_inputs({"input_ids": input_ids}).positions
        attentions, backend = _attentions(self.base), attn_implementation(self.base.config)
        total = torch.zeros((), device=input_ids.device)
        for layer, states_BNE, mask, target in targets:
            if self.drops_table:  # remove what the states at the same position have in common
                states_BNE = states_BNE - (states_BNE.mean(0, keepdim=True) - states_BNE.mean((0, 1), keepdim=True))
            log_weights = _attention_log_weights(attentions[layer], states_BNE, positions, mask, backend)
            divergence = nn.functional.kl_div(log_weights, target, reduction="none", log_target=True)
            total = total + divergence.sum(-1).mean()
        return total / len(targets)

    @torch.no_grad()
    def _stock_attention(self, input_ids: torch.Tensor) -> list[tuple[int, torch.Tensor, Any, torch.Tensor]]:
        """For each call of an attention layer: its index, hidden states, mask and log attention weights."""
        positions = self.stock_base.prepare_inputs({"input_ids": input_ids}).positions
        targets, backend = [], attn_implementation(self.base.config)

        def record(attention: PosEncAttention, args: Any, kwargs: Any) -> None:
            inputs = {**dict(zip(attention.argument_names, args, strict=False)), **kwargs}
            states_BNE, mask = inputs["hidden_states"], inputs.get("attention_mask")
            log_weights = _attention_log_weights(attention, states_BNE, positions, mask, backend)
            targets.append((attention.layer_idx, states_BNE, mask, log_weights))

        with contextlib.ExitStack() as hooks:
            for attention in _attentions(self.stock_base):
                hooks.enter_context(attention.register_forward_pre_hook(record, with_kwargs=True))
            self.stock_base(input_ids)
        return targets


def _reference_copy(stock_base: PreTrainedModel, base: PreTrainedModel) -> PreTrainedModel:
    """A frozen copy with its own encoding as a scheme, which computes the same and exposes its attention layers."""
    reference = copy.deepcopy(stock_base).to(device=base.device, dtype=base.dtype).eval().requires_grad_(False)
    reference.set_attn_implementation("eager")  # every layer gets its mask, which differs where some have a window
    return reference if isinstance(reference, PosEncBaseModel) else retrofit(reference, base.architecture.stock_scheme)


def _attentions(base: PreTrainedModel) -> list[PosEncAttention]:
    return base.architecture.self_attentions(base)


def _attention_log_weights(
    attention: PosEncAttention, states_BNE: torch.Tensor, positions: Positions, mask: torch.Tensor | None, backend: str
) -> torch.Tensor:
    """The logarithm of the attention weights for given hidden states instead of the layer's own.

    (B, H, N, N), or one more key for the architecture's sinks.
    """
    layer, projections = attention.layer_schemes(positions), attention.project(states_BNE)
    query_BHND, key_BGND, softcap = projections.query_BHND, projections.key_BGND, projections.softcap
    visible = visible_pairs(mask, positions.causal and mask is None, query_BHND, states_BNE.shape[1])
    rotations = [*layer.rotate, *layer.stock_rotation]
    content = Content(
        query_BHND,
        apply_rotation(query_BHND, rotations, keys=False),
        apply_rotation(key_BGND, rotations, keys=True),
        projections.scaling,
        lambda: visible,
        attention.project_rows,
    )
    query_BHND = scale_content(content.rotated_query_BHQD, layer.content_scale)
    logits = query_BHND.matmul(content.key_BHKD.transpose(-1, -2)) * content.scaling
    if softcap is not None and backend != "sdpa":  # SDPA does not cap
        logits = softcap * torch.tanh(logits / softcap)
    for term in score_terms(layer.score, content):
        logits = logits + materialize(term, positions, content)
    logits = logits.masked_fill(~visible, torch.finfo(logits.dtype).min)
    if projections.sinks_H is not None:
        sinks_BHN1 = projections.sinks_H[:, None, None].expand(*logits.shape[:-1], 1)
        logits = torch.cat([logits, sinks_BHN1], dim=-1)
    return logits.log_softmax(-1)
