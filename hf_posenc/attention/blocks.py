"""Score terms for some heads and a run of queries at a time: what each adds there, and what it gets back in training.

A block holds tensors of the whole attention, but no more than a chunk of the logits is ever there at once. Queries
stand in falling order throughout, the last one first: query t and key j are at distance number t + j then.

Shape legend: B batch, H heads, G heads of keys, Q queries, M queries of a chunk, K keys, S keys that it sees,
D width of a head, L = Q + K - 1 distances, N near distances.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

import torch

from ..schemes.terms import DistanceBias, DistanceTable, KeyTerm, QueryTerm, Separable, Term
from .bands import RUN, DistanceLayout, Run, Vectors, layout_by_distance, products_with_ends, write_products
from .call import AttentionCall
from .materialize import slice_heads, strided_bias

HEADS_AT_A_TIME = 4
"""Measured: one leaves cores idle, two cost calls, and more leave the caches."""


class Chunk(NamedTuple):
    """Some heads, and a run of queries, in falling order, with the keys they see: the first `seen`."""

    heads: slice
    groups: slice
    """The heads of keys that belong to the heads."""
    start: int
    stop: int
    seen: int

    @property
    def queries(self) -> slice:
        return slice(self.start, self.stop)

    def for_heads(self, states_BGKD: torch.Tensor) -> torch.Tensor:
        """(B, H, S, D): the keys or values that it sees, once for each of its heads."""
        own = states_BGKD[:, self.groups, : self.seen]
        shared = (self.heads.stop - self.heads.start) // own.shape[1]
        return own.repeat_interleave(shared, dim=1) if shared > 1 else own

    def add_by_group(self, sums_BGKD: torch.Tensor, found_BHSD: torch.Tensor, keys: slice | None = None) -> None:
        """The reverse: what the heads found, of all keys that it sees or some, added to the heads of keys."""
        own = sums_BGKD[:, self.groups, keys or slice(0, self.seen)]
        own += found_BHSD.unflatten(1, (own.shape[1], -1)).sum(2)


def iter_head_groups(query: torch.Tensor, key: torch.Tensor) -> Iterator[tuple[slice, slice]]:
    """Some heads, and the heads of keys that they share, at a time: always whole groups."""
    num_groups = key.shape[1]
    shared = query.shape[1] // num_groups
    step = max(HEADS_AT_A_TIME // shared, 1)
    for first in range(0, num_groups, step):
        groups = slice(first, min(first + step, num_groups))
        yield slice(groups.start * shared, groups.stop * shared), groups


def iter_chunks(query: torch.Tensor, key: torch.Tensor, causal: bool, size: int) -> Iterator[Chunk]:
    """All of an attention in chunks of so many queries."""
    num_queries = query.shape[2]
    for heads, groups in iter_head_groups(query, key):
        for start in range(0, num_queries, size):
            stop = min(start + size, num_queries)
            yield Chunk(heads, groups, start, stop, num_queries - start if causal else key.shape[2])


class Block(Protocol):
    """A score term by chunks."""

    @property
    def batch(self) -> int:
        """1 where all rows of a batch get the same."""
        ...

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]: ...

    def with_tensors(self, *tensors: torch.Tensor) -> Block: ...

    def put(self, into_BHMS: torch.Tensor, chunk: Chunk, fresh: bool) -> None:
        """Write it if `fresh`, else add it to what is there."""

    def accumulate_grad(self, d_logits_BHMS: torch.Tensor, chunk: Chunk, sums: list[torch.Tensor]) -> None:
        """Add to `sums`, one for each of `tensors`, what they get of the gradient of the logits."""


def _put(into: torch.Tensor, values: torch.Tensor, fresh: bool) -> None:
    (into.copy_ if fresh else into.add_)(values)


@dataclasses.dataclass(frozen=True)
class DistanceBlock:
    """By head and distance: a view of one vector a head."""

    values_HL: torch.Tensor
    batch = 1

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return (self.values_HL,)

    def with_tensors(self, *tensors: torch.Tensor) -> DistanceBlock:
        return DistanceBlock(*tensors)

    def _part(self, values_HL: torch.Tensor, chunk: Chunk) -> torch.Tensor:
        return slice_heads(values_HL, 0, chunk.heads)[:, chunk.start : chunk.stop + chunk.seen - 1]

    def put(self, into_BHMS: torch.Tensor, chunk: Chunk, fresh: bool) -> None:
        _put(into_BHMS, strided_bias(self._part(self.values_HL, chunk), chunk.seen), fresh)

    def accumulate_grad(self, d_logits_BHMS: torch.Tensor, chunk: Chunk, sums: list[torch.Tensor]) -> None:
        own = self._part(sums[0], chunk)
        own += layout_by_distance(d_logits_BHMS, d_logits_BHMS.dtype).sum((1, 2)).sum_to_size(own.shape)


@dataclasses.dataclass(frozen=True)
class _ProductBlock:
    """Products of states and the vectors of distances: what those of queries and of keys share."""

    states: torch.Tensor
    """Queries (B, H, Q, D), or keys (B, G, K, D)."""
    vectors: Vectors

    @property
    def batch(self) -> int:
        return self.states.shape[0]

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return self.states, self.vectors.near_HND

    def with_tensors(self, *tensors: torch.Tensor) -> Any:
        return type(self)(tensors[0], dataclasses.replace(self.vectors, near_HND=tensors[1]))


class QueryBlock(_ProductBlock):
    """By query and distance."""

    def put(self, into_BHMS: torch.Tensor, chunk: Chunk, fresh: bool) -> None:
        own = self.states[:, chunk.heads, chunk.queries]
        ends = products_with_ends(own, self.vectors, chunk.heads)
        for run, rows in _query_runs(self.vectors, chunk):
            write_products(into_BHMS[:, :, rows], own[:, :, rows], ends[:, :, rows], run, fresh)

    def accumulate_grad(self, d_logits_BHMS: torch.Tensor, chunk: Chunk, sums: list[torch.Tensor]) -> None:
        own, found = (states[:, chunk.heads, chunk.queries] for states in (self.states, sums[0]))
        for run, rows in _query_runs(self.vectors, chunk):
            laid = DistanceLayout(d_logits_BHMS[:, :, rows], run, own.dtype)
            found[:, :, rows] += laid.sums_of_vectors()
            laid.add_sums_of_states(sums[1], own[:, :, rows])


class KeyBlock(_ProductBlock):
    """By key and distance: the roles of queries and keys are exchanged."""

    def _runs(self, chunk: Chunk) -> Iterator[tuple[Run, slice, torch.Tensor]]:
        states = chunk.for_heads(self.states)
        for start in range(0, chunk.seen, RUN):
            rows = slice(start, min(start + RUN, chunk.seen))
            run = Run(self.vectors, chunk.heads, (rows.start, rows.stop), (chunk.start, chunk.stop))
            yield run, rows, states[:, :, rows]

    def put(self, into_BHMS: torch.Tensor, chunk: Chunk, fresh: bool) -> None:
        for run, rows, states in self._runs(chunk):
            ends = products_with_ends(states, self.vectors, chunk.heads) if run.far else None
            write_products(into_BHMS[..., rows].transpose(-1, -2), states, ends, run, fresh)

    def accumulate_grad(self, d_logits_BHMS: torch.Tensor, chunk: Chunk, sums: list[torch.Tensor]) -> None:
        for run, rows, states in self._runs(chunk):
            laid = DistanceLayout(d_logits_BHMS[..., rows].transpose(-1, -2), run, states.dtype)
            chunk.add_by_group(sums[0], laid.sums_of_vectors(), rows)
            laid.add_sums_of_states(sums[1], states)


@dataclasses.dataclass(frozen=True)
class SeparableBlock:
    """A product of something of the query and something of the key, folded into the logits of a chunk."""

    queries: torch.Tensor
    keys: torch.Tensor

    @property
    def batch(self) -> int:
        return max(self.queries.shape[0], self.keys.shape[0])

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return self.queries, self.keys

    def with_tensors(self, *tensors: torch.Tensor) -> SeparableBlock:
        return SeparableBlock(*tensors)

    def _parts(self, queries: torch.Tensor, keys: torch.Tensor, chunk: Chunk) -> tuple[torch.Tensor, torch.Tensor]:
        of_queries, of_keys = (slice_heads(states, 1, chunk.heads) for states in (queries, keys))
        return of_queries[:, :, chunk.queries], of_keys[:, :, : chunk.seen]

    def put(self, into_BHMS: torch.Tensor, chunk: Chunk, fresh: bool) -> None:
        queries, keys = self._parts(self.queries, self.keys, chunk)
        across = keys.transpose(-1, -2)
        shape = tuple(max(own, other) for own, other in zip(queries.shape[:2], keys.shape[:2], strict=True))
        if fresh and shape == into_BHMS.shape[:2] and queries.dtype == into_BHMS.dtype:
            torch.matmul(queries, across, out=into_BHMS)
        else:
            _put(into_BHMS, queries.matmul(across), fresh)

    def accumulate_grad(self, d_logits_BHMS: torch.Tensor, chunk: Chunk, sums: list[torch.Tensor]) -> None:
        queries, keys = self._parts(self.queries, self.keys, chunk)
        for_queries, for_keys = self._parts(sums[0], sums[1], chunk)
        d_logits = d_logits_BHMS.to(queries.dtype)
        if for_queries.shape[0] == for_keys.shape[0] == 1:  # the same for all rows of the batch: sum first
            d_logits = d_logits.sum(0, keepdim=True)
        for_queries += d_logits.matmul(keys).sum_to_size(for_queries.shape)
        for_keys += d_logits.transpose(-1, -2).matmul(queries).sum_to_size(for_keys.shape)


@dataclasses.dataclass(frozen=True)
class DenseBlock:
    """Anything else, written out: (B or 1, H or 1, Q or 1, K), its queries in rising order."""

    values: torch.Tensor

    @property
    def batch(self) -> int:
        return self.values.shape[0]

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return (self.values,)

    def with_tensors(self, *tensors: torch.Tensor) -> DenseBlock:
        return DenseBlock(*tensors)

    def _part(self, values: torch.Tensor, chunk: Chunk) -> torch.Tensor:
        values, count = slice_heads(values, 1, chunk.heads)[..., : chunk.seen], values.shape[2]
        return values if count == 1 else values[:, :, count - chunk.stop : count - chunk.start]

    def put(self, into_BHMS: torch.Tensor, chunk: Chunk, fresh: bool) -> None:
        _put(into_BHMS, self._part(self.values, chunk).flip(2), fresh)

    def accumulate_grad(self, d_logits_BHMS: torch.Tensor, chunk: Chunk, sums: list[torch.Tensor]) -> None:
        own = self._part(sums[0], chunk)
        own += d_logits_BHMS.flip(2).sum_to_size(own.shape)


@dataclasses.dataclass(frozen=True)
class ValueBlock:
    """Vectors by distance that join the values."""

    vectors: Vectors

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return (self.vectors.near_HND,)

    def with_tensors(self, *tensors: torch.Tensor) -> ValueBlock:
        return ValueBlock(dataclasses.replace(self.vectors, near_HND=tensors[0]))

    def add_weighted(self, output_BHMD: torch.Tensor, weights_BHMS: torch.Tensor, chunk: Chunk) -> None:
        """To each query's output, the vectors at its keys' distances by the keys' weights."""
        for run, rows in _query_runs(self.vectors, chunk):
            laid = DistanceLayout(weights_BHMS[:, :, rows], run, output_BHMD.dtype)
            output_BHMD[:, :, rows] += laid.sums_of_vectors()

    def accumulate_grad(
        self,
        grad_BHMD: torch.Tensor,
        weights_BHMS: torch.Tensor,
        chunk: Chunk,
        d_weights_BHMS: torch.Tensor,
        sums: list[torch.Tensor],
    ) -> None:
        """Add what the weights and the vectors get of the gradient of the output."""
        ends = products_with_ends(grad_BHMD, self.vectors, chunk.heads)
        for run, rows in _query_runs(self.vectors, chunk):
            grad = grad_BHMD[:, :, rows]
            write_products(d_weights_BHMS[:, :, rows], grad, ends[:, :, rows], run, fresh=False)
            DistanceLayout(weights_BHMS[:, :, rows], run, grad.dtype).add_sums_of_states(sums[0], grad)


def _query_runs(vectors: Vectors, chunk: Chunk) -> Iterator[tuple[Run, slice]]:
    """Runs of a chunk's queries, and where they are in the chunk."""
    for start in range(chunk.start, chunk.stop, RUN):
        stop = min(start + RUN, chunk.stop)
        run = Run(vectors, chunk.heads, (start, stop), (0, chunk.seen))
        yield run, slice(start - chunk.start, stop - chunk.start)


def make_value_block(rows: DistanceTable, call: AttentionCall) -> ValueBlock:
    return ValueBlock(_vectors_of(rows, call))


def _vectors_of(rows: DistanceTable, call: AttentionCall) -> Vectors:
    index_L = rows.index[: call.query.shape[2] + call.key.shape[2] - 1]
    device = call.query.device
    return Vectors.of_table(rows.rows_HRD.to(device), index_L.to(device), call.query.dtype)


def make_block(term: Term, call: AttentionCall) -> Block:
    """A term, where positions are uniform. Of keys it may have more: slots that the call has cut off."""
    num_keys, device = call.key.shape[2], call.query.device
    if isinstance(term, DistanceBias):
        return DistanceBlock(term.values.to(device)[:, : call.query.shape[2] + num_keys - 1])
    if isinstance(term, QueryTerm):
        return QueryBlock(call.content.query_BHQD.flip(2), _vectors_of(term.table, call))
    if isinstance(term, KeyTerm):
        return KeyBlock(call.content.key_BGKD[:, :, :num_keys], _vectors_of(term.table, call))
    if isinstance(term, Separable):
        return SeparableBlock(term.queries.to(device).flip(2), term.keys.to(device)[:, :, :num_keys])
    return DenseBlock(term.to(device)[..., :num_keys])
