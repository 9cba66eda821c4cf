"""Score and value terms computed chunk by chunk: their forward values, and their gradients.

A block holds tensors of the whole attention, but only one chunk of the logits exists at a time. Queries are in reverse
order throughout, so that query t and key j are at distance index t + j (see `bands`).

Shape legend: B batch, H heads, G key heads, Q queries, M queries of a chunk, K keys, S keys visible to the chunk,
D head size, L = Q + K - 1 distances, N near distances.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeVar

import torch

from ..schemes import DistanceBias, DistanceTable, KeyTerm, QueryTerm, RunningSum, Separable, Term, repeat_key_heads
from .bands import DistanceVectors, SkewedTile, Tile, iter_tiles, skew
from .dense import strided_bias
from .dispatch import AttentionCall, iter_head_slices, slice_heads

BlockT = TypeVar("BlockT", bound="Block")


class Chunk(NamedTuple):
    """Some heads and consecutive queries, in reverse order, with the keys visible to them: the first `num_keys`."""

    heads: slice
    key_heads: slice
    start: int
    stop: int
    num_keys: int

    @property
    def queries(self) -> slice:
        return slice(self.start, self.stop)

    @property
    def num_heads(self) -> int:
        return int(self.heads.stop - self.heads.start)

    def expand_keys(self, states_BGKD: torch.Tensor) -> torch.Tensor:
        """(B, H, S, D): the visible keys or values, repeated for each of the chunk's heads."""
        return repeat_key_heads(states_BGKD[:, self.key_heads, : self.num_keys], self.num_heads)

    def add_to_keys(self, out_BGKD: torch.Tensor, states_BHSD: torch.Tensor, keys: slice | None = None) -> None:
        """The reverse of `expand_keys`: add the sum over the heads that share a key, for all visible keys or some."""
        out = out_BGKD[:, self.key_heads, keys or slice(0, self.num_keys)]
        out += states_BHSD.unflatten(1, (out.shape[1], -1)).sum(2)


def iter_chunks(query: torch.Tensor, key: torch.Tensor, causal: bool, size: int) -> Iterator[Chunk]:
    """Split an attention into chunks of at most `size` queries."""
    num_queries = query.shape[2]
    for heads, key_heads in iter_head_slices(query, key):
        for start in range(0, num_queries, size):
            stop = min(start + size, num_queries)
            yield Chunk(heads, key_heads, start, stop, num_queries - start if causal else key.shape[2])


@dataclasses.dataclass(frozen=True)
class Block:
    """A term computed chunk by chunk."""

    tensors: tuple[torch.Tensor, ...]

    def with_tensors(self: BlockT, tensors: Sequence[torch.Tensor]) -> BlockT:
        return dataclasses.replace(self, tensors=tuple(tensors))


@dataclasses.dataclass(frozen=True)
class VectorBlock(Block):
    """A term with `DistanceVectors`, whose `near_HND` is the last of its tensors."""

    first: int

    @property
    def vectors(self) -> DistanceVectors:
        return DistanceVectors(self.tensors[-1], self.first)


class ScoreBlock(Block):
    """A score term. The batch size is 1 if the term is the same for the whole batch."""

    @property
    def batch_size(self) -> int:
        return self.tensors[0].shape[0]

    def write(self, out_BHMS: torch.Tensor, chunk: Chunk, overwrite: bool) -> None:
        """Write the term of a chunk, or add it."""
        raise NotImplementedError

    def accumulate_grad(self, d_logits_BHMS: torch.Tensor, chunk: Chunk, grads: Sequence[torch.Tensor]) -> None:
        """Add to `grads`, one per tensor, what they receive from the gradient of a chunk's logits."""
        raise NotImplementedError


def _write(out: torch.Tensor, values: torch.Tensor, overwrite: bool) -> None:
    (out.copy_ if overwrite else out.add_)(values)


class DistanceBlock(ScoreBlock):
    """A bias per head and distance, (H or 1, L): a view of one vector per head."""

    batch_size = 1

    def _slice(self, values_HL: torch.Tensor, chunk: Chunk) -> torch.Tensor:
        return slice_heads(values_HL, 0, chunk.heads)[:, chunk.start : chunk.stop + chunk.num_keys - 1]

    def write(self, out_BHMS: torch.Tensor, chunk: Chunk, overwrite: bool) -> None:
        _write(out_BHMS, strided_bias(self._slice(self.tensors[0], chunk), chunk.num_keys), overwrite)

    def accumulate_grad(self, d_logits_BHMS: torch.Tensor, chunk: Chunk, grads: Sequence[torch.Tensor]) -> None:
        grad = self._slice(grads[0], chunk)
        grad += skew(d_logits_BHMS, d_logits_BHMS.dtype).sum((1, 2)).sum_to_size(grad.shape)


class QueryBlock(VectorBlock, ScoreBlock):
    """Products of queries, (B, H, Q, D), with the vectors of distances."""

    def write(self, out_BHMS: torch.Tensor, chunk: Chunk, overwrite: bool) -> None:
        query = self.tensors[0][:, chunk.heads, chunk.queries]
        far = self.vectors.far_products(query, chunk.heads)
        for tile, rows in _query_tiles(self.vectors, chunk):
            tile.write_products(out_BHMS[:, :, rows], query[:, :, rows], far[:, :, rows], overwrite)

    def accumulate_grad(self, d_logits_BHMS: torch.Tensor, chunk: Chunk, grads: Sequence[torch.Tensor]) -> None:
        query, d_query = (states[:, chunk.heads, chunk.queries] for states in (self.tensors[0], grads[0]))
        for tile, rows in _query_tiles(self.vectors, chunk):
            d_logits = SkewedTile(d_logits_BHMS[:, :, rows], tile, query.dtype)
            d_query[:, :, rows] += d_logits.weighted_vectors()
            d_logits.add_weighted_states(grads[1], query[:, :, rows])


class KeyBlock(VectorBlock, ScoreBlock):
    """Products of keys, (B, G, K, D), with the vectors of distances: tiles have keys as rows, queries as columns."""

    def _tiles(self, chunk: Chunk) -> Iterator[tuple[Tile, slice, torch.Tensor]]:
        key = chunk.expand_keys(self.tensors[0])
        for tile, rows in iter_tiles(self.vectors, chunk.heads, (0, chunk.num_keys), (chunk.start, chunk.stop)):
            yield tile, rows, key[:, :, rows]

    def write(self, out_BHMS: torch.Tensor, chunk: Chunk, overwrite: bool) -> None:
        for tile, rows, key in self._tiles(chunk):
            far = self.vectors.far_products(key, chunk.heads) if tile.far else None
            tile.write_products(out_BHMS[..., rows].transpose(-1, -2), key, far, overwrite)

    def accumulate_grad(self, d_logits_BHMS: torch.Tensor, chunk: Chunk, grads: Sequence[torch.Tensor]) -> None:
        for tile, rows, key in self._tiles(chunk):
            d_logits = SkewedTile(d_logits_BHMS[..., rows].transpose(-1, -2), tile, key.dtype)
            chunk.add_to_keys(grads[0], d_logits.weighted_vectors(), rows)
            d_logits.add_weighted_states(grads[1], key)


class SeparableBlock(ScoreBlock):
    """A product of query and key factors, (B or 1, H or 1, Q or K, any width)."""

    @property
    def batch_size(self) -> int:
        return max(factor.shape[0] for factor in self.tensors)

    def _slice(self, factors: Sequence[torch.Tensor], chunk: Chunk) -> tuple[torch.Tensor, torch.Tensor]:
        queries, keys = (slice_heads(factor, 1, chunk.heads) for factor in factors)
        return queries[:, :, chunk.queries], keys[:, :, : chunk.num_keys]

    def write(self, out_BHMS: torch.Tensor, chunk: Chunk, overwrite: bool) -> None:
        queries, keys = self._slice(self.tensors, chunk)
        shape = torch.broadcast_shapes(queries.shape[:2], keys.shape[:2])
        if overwrite and shape == out_BHMS.shape[:2] and queries.dtype == out_BHMS.dtype:
            torch.matmul(queries, keys.transpose(-1, -2), out=out_BHMS)
        else:
            _write(out_BHMS, queries.matmul(keys.transpose(-1, -2)), overwrite)

    def accumulate_grad(self, d_logits_BHMS: torch.Tensor, chunk: Chunk, grads: Sequence[torch.Tensor]) -> None:
        queries, keys = self._slice(self.tensors, chunk)
        d_queries, d_keys = self._slice(grads, chunk)
        d_logits = d_logits_BHMS.to(queries.dtype)
        if d_queries.shape[0] == d_keys.shape[0] == 1:  # the same for the whole batch: sum first
            d_logits = d_logits.sum(0, keepdim=True)
        d_queries += d_logits.matmul(keys).sum_to_size(d_queries.shape)
        d_keys += d_logits.transpose(-1, -2).matmul(queries).sum_to_size(d_keys.shape)


class RunningSumBlock(ScoreBlock):
    """Differences of running sums, (B, H, Q) and (B, H, K), relative to the chunk's last query.

    So the numbers of near keys are small, and exact in float32, however long the row is.
    """

    def write(self, out_BHMS: torch.Tensor, chunk: Chunk, overwrite: bool) -> None:
        queries, keys = (sums[:, chunk.heads] for sums in self.tensors)
        queries, keys = queries[..., chunk.queries], keys[..., : chunk.num_keys]
        last = queries[..., :1]  # queries are reversed
        queries_BHM1, keys_BH1S = (queries - last).to(out_BHMS)[..., None], (keys - last).to(out_BHMS)[..., None, :]
        if overwrite:
            torch.sub(queries_BHM1, keys_BH1S, out=out_BHMS)
        else:
            out_BHMS.add_(queries_BHM1).sub_(keys_BH1S)

    def accumulate_grad(self, d_logits_BHMS: torch.Tensor, chunk: Chunk, grads: Sequence[torch.Tensor]) -> None:
        """Softmax ignores what is the same for all keys of a query, so sums at the queries have no gradient."""
        grads[1][:, chunk.heads, : chunk.num_keys] -= d_logits_BHMS.sum(2)


class DenseBlock(ScoreBlock):
    """Any other term, as a dense tensor (B or 1, H or 1, Q or 1, K), its queries not reversed."""

    def _slice(self, values: torch.Tensor, chunk: Chunk) -> torch.Tensor:
        values, num_queries = slice_heads(values, 1, chunk.heads)[..., : chunk.num_keys], values.shape[2]
        return values if num_queries == 1 else values[:, :, num_queries - chunk.stop : num_queries - chunk.start]

    def write(self, out_BHMS: torch.Tensor, chunk: Chunk, overwrite: bool) -> None:
        _write(out_BHMS, self._slice(self.tensors[0], chunk).flip(2), overwrite)

    def accumulate_grad(self, d_logits_BHMS: torch.Tensor, chunk: Chunk, grads: Sequence[torch.Tensor]) -> None:
        grad = self._slice(grads[0], chunk)
        grad += d_logits_BHMS.flip(2).sum_to_size(grad.shape)


class ValueBlock(VectorBlock):
    """Vectors per distance that are added to the values."""

    def add_output(self, output_BHMD: torch.Tensor, weights_BHMS: torch.Tensor, chunk: Chunk) -> None:
        """Add to each query's output the vectors at its keys' distances, times the attention weights."""
        for tile, rows in _query_tiles(self.vectors, chunk):
            weights = SkewedTile(weights_BHMS[:, :, rows], tile, output_BHMD.dtype)
            output_BHMD[:, :, rows] += weights.weighted_vectors()

    def accumulate_grad(
        self,
        d_output_BHMD: torch.Tensor,
        weights_BHMS: torch.Tensor,
        chunk: Chunk,
        d_weights_BHMS: torch.Tensor,
        grads: Sequence[torch.Tensor],
    ) -> None:
        """Add what the weights and the vectors receive from the gradient of a chunk's output."""
        far = self.vectors.far_products(d_output_BHMD, chunk.heads)
        for tile, rows in _query_tiles(self.vectors, chunk):
            d_output = d_output_BHMD[:, :, rows]
            tile.write_products(d_weights_BHMS[:, :, rows], d_output, far[:, :, rows], overwrite=False)
            SkewedTile(weights_BHMS[:, :, rows], tile, d_output.dtype).add_weighted_states(grads[0], d_output)


def _query_tiles(vectors: DistanceVectors, chunk: Chunk) -> Iterator[tuple[Tile, slice]]:
    return iter_tiles(vectors, chunk.heads, (chunk.start, chunk.stop), (0, chunk.num_keys))


def make_score_block(term: Term, call: AttentionCall) -> ScoreBlock:
    """The block of a term with uniform positions. Keys beyond those of the call (empty cache slots) are cut off."""
    num_keys, device = call.key.shape[2], call.query.device
    if isinstance(term, DistanceBias):
        return DistanceBlock((term.values.to(device)[:, : call.query.shape[2] + num_keys - 1],))
    if isinstance(term, QueryTerm):
        vectors = _distance_vectors(term.table, call)
        return QueryBlock((call.content.query_BHQD.flip(2), vectors.near_HND), vectors.first)
    if isinstance(term, KeyTerm):
        vectors = _distance_vectors(term.table, call)
        return KeyBlock((call.content.key_BGKD[:, :, :num_keys], vectors.near_HND), vectors.first)
    if isinstance(term, Separable):
        return SeparableBlock((term.queries.to(device).flip(2), term.keys.to(device)[:, :, :num_keys]))
    if isinstance(term, RunningSum):
        return RunningSumBlock((term.queries.flip(2), term.keys[:, :, :num_keys]))
    return DenseBlock((term.to(device)[..., :num_keys],))


def make_value_block(table: DistanceTable, call: AttentionCall) -> ValueBlock:
    vectors = _distance_vectors(table, call)
    return ValueBlock((vectors.near_HND,), vectors.first)


def _distance_vectors(table: DistanceTable, call: AttentionCall) -> DistanceVectors:
    index_L, device = table.index[: call.query.shape[2] + call.key.shape[2] - 1], call.query.device
    return DistanceVectors.from_table(table.rows_HRD.to(device), index_L.to(device), call.query.dtype)
