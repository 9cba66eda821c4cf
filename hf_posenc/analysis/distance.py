"""What depends on the distance from query to key: attention, score biases, and lookups in relative tables.

Distances are key position minus query position. Shape legend: H heads, N tokens, L number of distances.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import nn

from ..errors import PosEncError
from .inspection import inspect_model


@dataclasses.dataclass(frozen=True)
class AttentionByDistance:
    """Attention weights of each layer and head, grouped by distance."""

    name: str
    distances: torch.Tensor
    """(L,), ascending."""
    share: torch.Tensor
    """(layers, heads, L): share of a query's attention at this distance, averaged over queries; sums to 1."""

    @property
    def mean_distance(self) -> torch.Tensor:
        """(layers, heads): attention-weighted mean of the absolute distance."""
        return (self.share * self.distances.abs()).sum(-1)

    def binned(self) -> tuple[list[str], torch.Tensor]:
        """Labels and (layers, heads, bins) shares for bins of absolute distance: 0, 1, 2-3, 4-7, and so on."""
        absolute = self.distances.abs()
        longest = int(absolute.max())
        starts = [0, *(2**power for power in range(longest.bit_length()))]
        ends = [min(max(2 * start - 1, 0), longest) for start in starts]
        labels = [f"{start}" if start == end else f"{start}-{end}" for start, end in zip(starts, ends, strict=True)]
        bins = torch.bucketize(absolute, torch.tensor(starts), right=True) - 1
        return labels, self.share.new_zeros(*self.share.shape[:-1], len(starts)).index_add_(-1, bins, self.share)

    def __str__(self) -> str:
        layers = (
            f"layer {layer}: {', '.join(f'{distance:.1f}' for distance in heads)}"
            for layer, heads in enumerate(self.mean_distance.tolist())
        )
        return f"{self.name}: mean attention distance per head: {'; '.join(layers)}"


def attention_by_distance(model: nn.Module, input_ids: torch.Tensor, name: str = "") -> AttentionByDistance:
    """Measure how much each head attends to each distance on a text.

    Args:
        model: A stock or converted model, with or without a head.
        input_ids: Token ids of shape (rows, tokens), without padding. Rows run one at a time, with eager attention.
        name: Label for plots; by default the name of the scheme.

    Returns:
        Attention by layer, head and distance.

    Raises:
        PosEncError: If the model is unsupported or `input_ids` do not fit it.

    Example:
        >>> print(attention_by_distance(model, tokenize_file("gpt2", "text.txt", 256, 8)))
    """
    length = input_ids.shape[-1]
    distances, slots = torch.arange(1 - length, length), torch.arange(length)
    distance_index = (slots - slots[:, None] + length - 1).flatten()
    with inspect_model(model, length) as inspector:
        totals = torch.zeros(len(inspector.attentions), inspector.shape.num_heads, len(distances), dtype=torch.float64)

        def add_weights(layer: int, hidden_states_NE: torch.Tensor, weights_HNN: torch.Tensor) -> None:
            totals[layer].index_add_(1, distance_index, weights_HNN.double().flatten(1).cpu())

        inspector.run(input_ids, add_weights)
    shown = distances < length if totals[..., distances > 0].any() else distances <= 0
    return AttentionByDistance(name or inspector.name, distances[shown], totals[..., shown] / input_ids.numel())


@dataclasses.dataclass(frozen=True)
class BiasByDistance:
    """The content-independent bias that a layer adds to the attention scores of each head."""

    name: str
    distances: torch.Tensor
    """(L,), ascending."""
    values: torch.Tensor
    """(heads, L)."""
    query: int | None
    """The query position it was evaluated at, if the bias depends on it; None if only the distance matters."""

    def __str__(self) -> str:
        if not self.values.any():
            return (
                f'{self.name}: zero at all distances. Trainable schemes start neutral: set "init": "paper" for the '
                "initialization of the paper, or use a trained checkpoint"
            )
        origin = "" if self.query is None else f" seen from position {self.query}"
        farthest = self.distances.abs().argmax()
        per_head = ", ".join(f"{value:.3g}" for value in self.values[:, farthest].tolist())
        return (
            f"{self.name}: bias from {self.values.min():.4g} to {self.values.max():.4g}{origin}; at distance "
            f"{int(self.distances[farthest])} per head: {per_head}"
        )


def bias_by_distance(model: nn.Module, length: int = 128, layer: int = 0) -> BiasByDistance:
    """Read the bias that a layer adds to the attention scores whatever the tokens are.

    A bias that depends on more than the distance (fire, tupe) is read at the last position, or in the middle of an
    encoder's input.

    Args:
        model: A stock or converted model, with or without a head.
        length: Number of positions.
        layer: The layer to read.

    Returns:
        The bias by head and distance.

    Raises:
        PosEncError: If the layer does not exist, or no bias is independent of the content.

    Example:
        >>> bias_by_distance(build_model("alibi"), 128).values.shape
        torch.Size([4, 128])
    """
    with inspect_model(model, length) as inspector:
        causal, bias = inspector.positions.causal, inspector.content_free_bias(layer)
        if bias is None:
            raise PosEncError(
                f"{inspector.name} adds no bias in layer {layer} that depends on the distance alone; try "
                "attention_by_distance"
            )
        at_query, only_distance = bias
        query = length - 1 if causal else length // 2
        distances, values = torch.arange(length) - query, at_query(query)
        if only_distance and not causal:  # the last query sees all keys behind it, the first all keys ahead
            distances = torch.arange(1 - length, length)
            values = torch.cat([at_query(length - 1), at_query(0)[:, 1:]], dim=-1)
    return BiasByDistance(inspector.name, distances, values, None if only_distance else query)


@dataclasses.dataclass(frozen=True)
class RelativeBuckets:
    """The row of a scheme's relative position table that each pair of query and key reads."""

    name: str
    index: torch.Tensor
    """(queries, keys)."""

    @property
    def num_used(self) -> int:
        """How many rows are read at all."""
        return len(self.index.unique())

    @property
    def max_exact_distance(self) -> int:
        """Looking back from the last query, distances up to this one have a row of their own."""
        rows = self.index[-1].flip(0)
        repeats = (rows[1:] == rows[:-1]).nonzero()
        return int(repeats[0]) - 1 if len(repeats) else len(rows) - 1

    def __str__(self) -> str:
        return (
            f"{self.name}: {len(self.index)} x {len(self.index)} pairs read {self.num_used} rows; looking back, "
            f"distances up to {self.max_exact_distance} have a row each"
        )


def relative_buckets(model: nn.Module, length: int = 64) -> RelativeBuckets:
    """Find the table row that each pair of positions reads, which shows how long distances are clipped or bucketed.

    Args:
        model: A stock or converted model, with or without a head.
        length: Number of positions.

    Returns:
        The matrix of rows.

    Raises:
        PosEncError: If no scheme of the model looks up a table by distance.
    """
    with inspect_model(model, length) as inspector:
        for scheme, prepared in zip(inspector.schemes, inspector.positions.prepared, strict=True):
            index = getattr(prepared, "buckets", prepared)
            if scheme.acts_at("score") and isinstance(index, torch.Tensor) and not index.is_floating_point():
                break
        else:
            raise PosEncError(f"{inspector.name} has no table indexed by distance; shaw, deberta, t5 and tupe have")
    if index.dim() == 1:
        slots = torch.arange(length)
        index = index.cpu()[slots - slots[:, None] + length - 1]
    return RelativeBuckets(inspector.name, index.reshape(length, length).cpu().clone())
