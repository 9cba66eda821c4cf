"""Warm start: fit a variant to the attention of the stock model that it replaces, before any training.

Given the content of the hidden states that enter each attention layer of the stock model, the variant's position
parameters are fitted layer by layer, so that its attention weights come as close as possible to the stock ones.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ..checkpoints import eval_mode, is_scheme_parameter
from ..errors import PosEncError
from .attention_targets import LayerTarget, StockAttention, check_input_ids, drops_table, paired_bases
from .closed_form import HeadOrders
from .optimizer import minimize

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
    head_orders: HeadOrders | None = None,
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
        head_orders: How the variant's heads were reordered, from `closed_form_start`.
        progress: Show a progress bar.

    Returns:
        The divergence between the two models' attention weights before and after.

    Raises:
        PosEncError: If the models do not belong together or `input_ids` cannot be used.

    Example:
        >>> variant = AutoModelForCausalLM.from_pretrained(name, position_scheme="t5")
        >>> hf_posenc.fit(stock_model, variant, input_ids, projections=True)
    """
    check_input_ids(input_ids)
    if rows < 1 or steps < 0:
        raise PosEncError(f"steps must be at least 0 and rows at least 1, got steps={steps} and rows={rows}")
    results = []
    with eval_mode(variant):
        for index, (stock_base, base) in enumerate(paired_bases(stock_model, variant)):
            orders = head_orders[index] if head_orders else {}
            divergence = _AttentionDivergence(StockAttention(stock_base, base), input_ids, rows, orders)
            groups = _parameter_groups(base, projections, learning_rate, projection_learning_rate)
            results.append(_fit_base(divergence, groups, steps, progress))
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
    for stock_base, base in paired_bases(stock_model, variant):
        architecture = base.architecture
        if architecture.constant is not None and drops_table(base):
            (embedding,) = base.get_submodule(architecture.constant).parameters()
            (table,) = stock_base.get_submodule(architecture.table).parameters()
            first_row = architecture.shape(stock_base.config).table_first_row
            embedding.add_(table[first_row : first_row + length].mean(0).to(embedding))


def _parameter_groups(
    base: PreTrainedModel, projections: bool, learning_rate: float, projection_rate: float | None
) -> list[dict[str, Any]]:
    schemes = [parameter for name, parameter in base.named_parameters() if is_scheme_parameter(name)]
    groups: list[dict[str, Any]] = [{"params": schemes, "lr": learning_rate}]
    if projections:
        # Value and output projections get no gradient, so the optimizer leaves them alone.
        modules = nn.ModuleList(base.architecture.self_attentions(base))
        weights = [parameter for name, parameter in modules.named_parameters() if not is_scheme_parameter(name)]
        default_rate = PROJECTION_LEARNING_RATE * min(1.0, math.sqrt(REFERENCE_WIDTH / base.config.hidden_size))
        groups.append({"params": weights, "lr": default_rate if projection_rate is None else projection_rate})
    return [group for group in groups if group["params"]]


def _fit_base(divergence: _AttentionDivergence, groups: list[dict[str, Any]], steps: int, progress: bool) -> FitResult:
    """Fit one base model; everything is put back if that made the divergence worse."""
    with torch.no_grad():
        before = divergence(0).item()
    if not groups or not steps:
        return FitResult(before, before)
    parameters = [parameter for group in groups for parameter in group["params"]]
    initial = [parameter.detach().to("cpu", copy=True) for parameter in parameters]
    minimize(divergence, groups, steps, "Fitting attention" if progress else None)
    with torch.no_grad():
        after = divergence(0).item()
        if after <= before:  # false for NaN
            return FitResult(before, after)
        for parameter, value in zip(parameters, initial, strict=True):
            parameter.copy_(value)
    return FitResult(before, before)


class _AttentionDivergence:
    """KL divergence from the stock attention weights to the variant's, on a few rows of text at a time."""

    def __init__(
        self, stock_attention: StockAttention, input_ids: torch.Tensor, rows: int, head_orders: dict[int, torch.Tensor]
    ) -> None:
        if stock_attention.drops_table and min(rows, len(input_ids)) < 2:
            raise PosEncError(
                "The effect of a position table is estimated from what several rows have in common: fit on at least 2 "
                f"rows per step; got {len(input_ids)} rows, {rows} per step"
            )
        self.stock_attention, self.head_orders = stock_attention, head_orders
        self.batches = input_ids[: len(input_ids) // rows * rows or len(input_ids)].split(rows)  # drops a short rest

    def __call__(self, step: int) -> torch.Tensor:
        """The mean over layers, heads and queries."""
        stock_attention = self.stock_attention
        input_ids = self.batches[step % len(self.batches)].to(stock_attention.base.device)
        targets: list[LayerTarget] = []
        stock_attention.visit_layers(input_ids, targets.append)
        positions = stock_attention.variant_positions(input_ids)
        total = torch.zeros((), device=input_ids.device)
        for layer, content_BNE, mask, target in targets:
            attention = stock_attention.attentions[layer]
            log_weights = stock_attention.log_weights(attention, content_BNE, positions, mask)
            if layer in self.head_orders:
                target = target[:, self.head_orders[layer].to(target.device)]
            divergence = nn.functional.kl_div(log_weights, target, reduction="none", log_target=True)
            total = total + divergence.sum(-1).mean()
        return total / len(targets)
