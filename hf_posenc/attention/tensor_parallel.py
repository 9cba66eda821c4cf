"""Tensor parallelism: the heads of a layer are divided among processes, but scheme parameters are whole on each.

A scheme computes its terms for all heads, or selects those of this process by `Content.select_heads`; what it returns
is cut to these heads here. Each process then has only its heads' part of the gradients of scheme parameters, so they
are summed over processes in the backward pass.

Shape legend: B batch, H heads, G key heads, Q queries, K keys, D head size, R rows, E hidden size.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ..errors import PosEncError
from ..schemes import (
    DistanceBias,
    DistanceTable,
    KeyTerm,
    QueryTerm,
    RunningSum,
    Scheme,
    Separable,
    Term,
)

Project = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


@dataclasses.dataclass(frozen=True)
class ProcessRank:
    """The processes that a module is divided among, and which of them this one is."""

    group: dist.ProcessGroup
    rank: int
    size: int


@dataclasses.dataclass(frozen=True)
class LocalHeads:
    """The heads of a layer that this process has, in a layer whose heads are divided."""

    heads: slice
    total: int
    process: ProcessRank

    def select(self, tensor: torch.Tensor, axis: int) -> torch.Tensor:
        """These heads of a tensor that has all of them; one with these heads only, or one for all, stays as it is."""
        size, here = tensor.shape[axis], self.heads.stop - self.heads.start
        if size == self.total:
            return tensor.narrow(axis, self.heads.start, here)
        if size not in (1, here):
            raise PosEncError(f"A term has {size} heads, but the model has {self.total}, and this process {here}")
        return tensor

    def select_table(self, table: DistanceTable) -> DistanceTable:
        return DistanceTable(self.select(table.rows_HRD, 0), table.index)

    def select_term(self, term: Term) -> Term:
        if isinstance(term, DistanceBias):
            return DistanceBias(self.select(term.values, 0))
        if isinstance(term, (QueryTerm, KeyTerm)):
            return type(term)(self.select_table(term.table))
        if isinstance(term, Separable):
            return Separable(self.select(term.queries, 1), self.select(term.keys, 1))
        if isinstance(term, RunningSum):
            return RunningSum(self.select(term.queries, 1), self.select(term.keys, 1))
        return self.select(term, 1)

    def sum_gradients(self, parameter: torch.Tensor) -> torch.Tensor:
        """The same tensor; its gradient is summed over the processes, each of which has the part of its heads."""

        def all_reduce(gradient: torch.Tensor) -> torch.Tensor:
            gradient = gradient.clone(memory_format=torch.contiguous_format)
            dist.all_reduce(gradient, group=self.process.group)
            return gradient

        return _with_gradient(parameter, all_reduce)

    def with_partial_gradients(self, project: Project) -> Project:
        """The layer's own projections, for tensors whose gradients will be summed over the processes.

        The projections sum the gradient of their input themselves, so each process passes on its share of the sum.
        """
        return lambda states_RE: project(_with_gradient(states_RE, lambda gradient: gradient / self.process.size))


def find_local_heads(
    module: Any, query_BHQD: torch.Tensor, key_BGKD: torch.Tensor, schemes: Sequence[Scheme]
) -> LocalHeads | None:
    """The heads of a layer that this process has.

    Args:
        module: The layer's attention module, a `PosEncAttention`.
        query_BHQD: The queries of this process.
        key_BGKD: The keys of this process.
        schemes: The schemes that change the scores or values of the layer, at least one.

    Returns:
        The heads, or None if it has all.

    Raises:
        PosEncError: If it cannot tell which heads these are.
    """
    total, here = schemes[0].shape.num_heads, query_BHQD.shape[1]
    if here == total:
        return None
    process: ProcessRank | None = module.process_rank()
    group_size = getattr(module, "num_key_value_groups", 1)
    if process is None or here * process.size != total or key_BGKD.shape[1] * group_size != here:
        raise PosEncError(
            f"A layer has {here} query heads and {key_BGKD.shape[1]} key heads in this process, where the model has "
            f"{total} query heads in groups of {group_size}. Position scheme {schemes[0].name!r} acts on the scores, "
            "and cannot tell which heads these are: use a tp_plan that divides queries, keys and values evenly by "
            'head, such as the model\'s own (tp_plan="auto") with a number of processes that divides the number of '
            "key heads, or load the model without tp_plan"
        )
    return LocalHeads(slice(here * process.rank, here * (process.rank + 1)), total, process)


def broadcast_parameters(parameters: Iterable[torch.Tensor], process: ProcessRank) -> None:
    """Give every process the values that the first one has."""
    from torch.distributed.tensor import DTensor  # missing where torch was built without distributed training

    source = dist.get_global_rank(process.group, 0)
    for parameter in parameters:
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        dist.broadcast(local.detach(), source, group=process.group)


def check_rotations(query_BHQD: torch.Tensor, rotations: Sequence[Scheme]) -> None:
    """Refuse to train a rotation under tensor parallelism: the gradients of its parameters would not be summed."""
    for scheme in rotations:
        is_divided = query_BHQD.shape[1] != scheme.shape.num_heads
        if is_divided and torch.is_grad_enabled() and any(param.requires_grad for param in scheme.parameters()):
            raise PosEncError(
                f"Position scheme {scheme.name!r} rotates with trained parameters, which tensor parallelism does not "
                "support: freeze them, or load the model without tp_plan"
            )


Gradient = Callable[[torch.Tensor], torch.Tensor]


class _WithGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, change: Gradient) -> torch.Tensor:
        ctx.change = change
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.change(gradient), None


def _with_gradient(tensor: torch.Tensor, change: Gradient) -> torch.Tensor:
    """The same tensor, whose gradient is changed in the backward pass."""
    if not (torch.is_grad_enabled() and tensor.requires_grad):
        return tensor
    result: torch.Tensor = _WithGradient.apply(tensor, change)  # type: ignore[no-untyped-call]
    return result
