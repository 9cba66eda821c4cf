"""KL divergence between two models' predictions, a chunk of tokens at a time.

With a large vocabulary, logits take more memory than everything else in a training step. So log-probabilities only ever
exist for one chunk, and where the output layer is linear, logits do too.

Shape legend: B batch, N tokens per row, T tokens of all rows, E hidden size, V vocabulary, K most likely tokens.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, TypeAlias

import torch
from torch import nn

CHUNK_ELEMENTS = 2**23
"""Logits per chunk: 32 MiB in float32, a few of which exist at a time."""


@dataclasses.dataclass(frozen=True)
class ProjectedLogits:
    """Logits that are computed only where they are needed: hidden states and the linear layer that projects them.

    Attributes:
        hidden_BNE: The last hidden states.
        weight_VE: The weight of the output layer.
        bias_V: Its bias, if it has one.
        dtype: The dtype of the projection.
    """

    hidden_BNE: torch.Tensor
    weight_VE: torch.Tensor
    bias_V: torch.Tensor | None
    dtype: torch.dtype

    @classmethod
    def from_head(cls, hidden_BNE: torch.Tensor, head: nn.Linear) -> ProjectedLogits:
        """The logits that a head would return, in the dtype of the current autocast context."""
        device_type = hidden_BNE.device.type
        uses_autocast = torch.is_autocast_enabled(device_type)
        dtype = torch.get_autocast_dtype(device_type) if uses_autocast else head.weight.dtype
        return cls(hidden_BNE, head.weight, head.bias, dtype)

    def dense(self) -> torch.Tensor:
        """All logits, without a gradient."""
        with torch.no_grad():
            return _project(self.hidden_BNE, self.weight_VE, self.bias_V, self.dtype)


@dataclasses.dataclass(frozen=True)
class TopLogProbs:
    """The most likely tokens of a prediction; all others are lumped together.

    Attributes:
        log_probs_BNK: Log-probabilities of the most likely tokens.
        ids_BNK: Their ids.
        log_rest_BN: Log of the total probability of all other tokens; minus infinity if there are none.
    """

    log_probs_BNK: torch.Tensor
    ids_BNK: torch.Tensor
    log_rest_BN: torch.Tensor


Logits: TypeAlias = torch.Tensor | ProjectedLogits
"""Logits of shape (..., V), as a tensor or computed on demand."""
Target: TypeAlias = torch.Tensor | ProjectedLogits | TopLogProbs
"""What a student's predictions are compared with."""


def kl_divergence(target: Target, logits: Logits, mask: torch.Tensor | None = None) -> torch.Tensor:
    """KL divergence from a teacher's predictions to a student's, in nats per prediction.

    Softmaxes are taken in float32 (or float64, if the student's logits are). Against `TopLogProbs` the divergence is
    a lower bound, exact if they cover the whole vocabulary.

    Args:
        target: The teacher's predictions.
        logits: The student's logits.
        mask: 1 at predictions that count and 0 at others; all of them count if None.

    Returns:
        The mean over predictions.
    """
    chunked_target = _TopTarget(target) if isinstance(target, TopLogProbs) else _FullTarget(target)
    values = logits.hidden_BNE if isinstance(logits, ProjectedLogits) else logits
    weights_T = torch.ones_like(values[..., 0]) if mask is None else mask.to(values.device)
    weights_T = weights_T.detach().flatten().to(torch.promote_types(values.dtype, torch.float32))
    if isinstance(logits, ProjectedLogits):
        hidden_TE = logits.hidden_BNE.flatten(0, -2)
        arguments = (hidden_TE, logits.weight_VE, logits.bias_V, logits.dtype, chunked_target, weights_T)
        total = _ProjectedDivergence.apply(*arguments)
    else:
        total = _DenseDivergence.apply(logits.flatten(0, -2), chunked_target, weights_T)
    return total / weights_T.sum().clamp(min=1)


@torch.no_grad()
def top_log_probs(logits: Logits, k: int) -> TopLogProbs:
    """The k most likely tokens of each prediction; all tokens if the vocabulary has fewer."""
    target = _FullTarget(logits)
    chunks = []
    for tokens in target.chunks():
        log_probs_TV = target.logits(tokens).log_softmax(-1)
        log_probs_TK, ids_TK = log_probs_TV.topk(min(k, log_probs_TV.shape[-1]), sorted=False)
        rest_T = log_probs_TV.scatter_(-1, ids_TK, float("-inf")).logsumexp(-1)
        chunks.append((log_probs_TK, ids_TK.to(torch.int32), rest_T))
    shape = (logits.hidden_BNE if isinstance(logits, ProjectedLogits) else logits).shape[:-1]
    log_probs, ids, rest = (torch.cat(parts).unflatten(0, shape) for parts in zip(*chunks, strict=True))
    return TopLogProbs(log_probs, ids, rest)


class _FullTarget:
    """A teacher's complete predictions."""

    def __init__(self, logits: Logits) -> None:
        self.head = logits if isinstance(logits, ProjectedLogits) else None
        values = logits.hidden_BNE if isinstance(logits, ProjectedLogits) else logits
        self.values = values.detach().flatten(0, -2)

    def chunks(self) -> Iterator[slice]:
        """Slices of tokens to process at a time."""
        return _chunks(len(self.values), len(self.head.weight_VE) if self.head else self.values.shape[-1])

    def logits(self, tokens: slice) -> torch.Tensor:
        """The logits of some tokens, in float32 or more."""
        if self.head is None:
            return _at_least_float32(self.values[tokens])
        return _project(self.values[tokens], self.head.weight_VE, self.head.bias_V, self.head.dtype)

    def divergence(self, log_probs_TV: torch.Tensor, tokens: slice, needs_grad: bool) -> _ChunkResult:
        """The divergence to a student's log-probabilities, which are overwritten, and its gradient by their logits."""
        target_TV = self.logits(tokens).to(log_probs_TV.dtype).log_softmax(-1)
        probs_TV = target_TV.exp()
        divergence_T = target_TV.sub_(log_probs_TV).mul_(probs_TV).sum(-1)
        return divergence_T, log_probs_TV.exp_().sub_(probs_TV) if needs_grad else None


class _TopTarget:
    """The most likely tokens of a teacher's predictions."""

    def __init__(self, top: TopLogProbs) -> None:
        self.log_probs_TK = _at_least_float32(top.log_probs_BNK.flatten(0, -2))
        self.ids_TK = top.ids_BNK.flatten(0, -2).long()
        self.log_rest_T = _at_least_float32(top.log_rest_BN.flatten())

    def divergence(self, log_probs_TV: torch.Tensor, tokens: slice, needs_grad: bool) -> _ChunkResult:
        """As for `_FullTarget`. Among the other tokens, the student's own proportions are right by definition."""
        ids_TK = self.ids_TK[tokens]
        target_TK, log_rest_T = (
            values[tokens].to(log_probs_TV.dtype) for values in (self.log_probs_TK, self.log_rest_T)
        )
        total_T1 = torch.cat([target_TK, log_rest_T[:, None]], -1).logsumexp(-1, keepdim=True)
        target_TK, log_rest_T = target_TK - total_T1, log_rest_T - total_T1[:, 0]  # stored values are rounded
        probs_TK, rest_T = target_TK.exp(), log_rest_T.exp()
        divergence_T = (probs_TK * (target_TK - log_probs_TV.gather(-1, ids_TK))).sum(-1)
        others_TV = log_probs_TV.scatter(-1, ids_TK, float("-inf"))
        log_student_rest_T = others_TV.logsumexp(-1)
        divergence_T += torch.where(rest_T > 0, rest_T * (log_rest_T - log_student_rest_T), 0.0)
        if not needs_grad:
            return divergence_T, None
        log_ratio_T = torch.where(rest_T > 0, log_rest_T - log_student_rest_T, float("-inf"))
        expected_TV = others_TV.add_(log_ratio_T[:, None]).exp_().scatter_(-1, ids_TK, probs_TK)
        return divergence_T, log_probs_TV.exp_().sub_(expected_TV)


_ChunkResult: TypeAlias = tuple[torch.Tensor, torch.Tensor | None]


class _DenseDivergence(torch.autograd.Function):
    """The sum for dense logits. Saves nothing else, and recomputes the softmaxes in the backward pass."""

    @staticmethod
    def forward(ctx: Any, logits_TV: torch.Tensor, target: Any, weights_T: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(logits_TV, weights_T)
        ctx.target = target
        total = torch.zeros((), dtype=_at_least_float32(logits_TV[:0]).dtype, device=logits_TV.device)
        for tokens in _chunks(*logits_TV.shape):
            log_probs_TV = _at_least_float32(logits_TV[tokens]).log_softmax(-1)
            divergence_T, _ = target.divergence(log_probs_TV, tokens, needs_grad=False)
            total += (divergence_T * weights_T[tokens]).sum()
        return total

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> Any:
        logits_TV, weights_T = ctx.saved_tensors
        grad_TV = torch.empty_like(logits_TV)
        for tokens in _chunks(*logits_TV.shape):
            log_probs_TV = _at_least_float32(logits_TV[tokens]).log_softmax(-1)
            _, grad_chunk_TV = ctx.target.divergence(log_probs_TV, tokens, needs_grad=True)
            grad_TV[tokens] = grad_chunk_TV.mul_((weights_T[tokens] * grad_outputs[0])[:, None])
        return grad_TV, None, None


class _ProjectedDivergence(torch.autograd.Function):
    """The sum for projected logits, which never exist as a whole: gradients are computed in the forward pass.

    This works because the result is a scalar, and saves projecting everything again in the backward pass.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_TE: torch.Tensor,
        weight_VE: torch.Tensor,
        bias_V: torch.Tensor | None,
        dtype: torch.dtype,
        target: Any,
        weights_T: torch.Tensor,
    ) -> torch.Tensor:
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        hidden_TE, weight_VE = hidden_TE.detach(), weight_VE.detach()
        bias_V = None if bias_V is None else bias_V.detach()
        wide = torch.promote_types(dtype, torch.float32)
        grads = [
            None if values is None or not needed else _at_least_float32(torch.zeros_like(values))
            for values, needed in ((hidden_TE, needs_hidden), (weight_VE, needs_weight), (bias_V, needs_bias))
        ]
        total = torch.zeros((), dtype=wide, device=hidden_TE.device)
        projection_VE = weight_VE.to(dtype)
        for tokens in _chunks(len(hidden_TE), len(weight_VE)):
            log_probs_TV = _project(hidden_TE[tokens], projection_VE, bias_V, dtype).log_softmax(-1)
            needs_grad = any(grad is not None for grad in grads)
            divergence_T, grad_TV = target.divergence(log_probs_TV, tokens, needs_grad)
            total += (divergence_T * weights_T[tokens]).sum()
            if grad_TV is not None:
                grad_TV = grad_TV.mul_(weights_T[tokens][:, None]).to(dtype)
                _accumulate(grads, tokens, grad_TV, hidden_TE[tokens].to(dtype), projection_VE)
        ctx.grads = grads
        ctx.dtypes = [hidden_TE.dtype, weight_VE.dtype, None if bias_V is None else bias_V.dtype]
        return total

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> Any:
        grads, ctx.grads = ctx.grads, None
        assert grads is not None, "the divergence can be differentiated only once"
        scaled = [
            None if grad is None else grad.mul_(grad_outputs[0]).to(dtype)
            for grad, dtype in zip(grads, ctx.dtypes, strict=True)
        ]
        return (*scaled, None, None, None)


def _accumulate(
    grads: list[torch.Tensor | None],
    tokens: slice,
    grad_TV: torch.Tensor,
    hidden_TE: torch.Tensor,
    projection_VE: torch.Tensor,
) -> None:
    """Add a chunk's part to the gradients of the hidden states, the weight and the bias."""
    grad_hidden_TE, grad_weight_VE, grad_bias_V = grads
    with torch.autocast(grad_TV.device.type, enabled=False):
        if grad_hidden_TE is not None:
            grad_hidden_TE[tokens] = (grad_TV @ projection_VE).to(grad_hidden_TE.dtype)
        if grad_weight_VE is not None and grad_weight_VE.dtype == grad_TV.dtype:
            grad_weight_VE.addmm_(grad_TV.T, hidden_TE)
        elif grad_weight_VE is not None:
            grad_weight_VE += grad_TV.T @ hidden_TE
        if grad_bias_V is not None:
            grad_bias_V += grad_TV.sum(0)


def _chunks(num_tokens: int, vocabulary: int) -> Iterator[slice]:
    size = max(CHUNK_ELEMENTS // vocabulary, 1)
    return (slice(start, start + size) for start in range(0, num_tokens, size))


def _project(
    hidden_TE: torch.Tensor, weight_VE: torch.Tensor, bias_V: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    """Logits in float32 or more, from a product in the given dtype."""
    with torch.autocast(hidden_TE.device.type, enabled=False):
        bias_V = None if bias_V is None else bias_V.to(dtype)
        return _at_least_float32(nn.functional.linear(hidden_TE.to(dtype), weight_VE.to(dtype), bias_V))


def _at_least_float32(values: torch.Tensor) -> torch.Tensor:
    return values.to(torch.promote_types(values.dtype, torch.float32))
