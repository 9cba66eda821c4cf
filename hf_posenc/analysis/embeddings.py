"""Position embeddings, and how well tokens and positions can be told apart once they are mixed at the input.

Shape legend: B rows, T tokens, N positions, E hidden size.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import nn

from ..errors import PosEncError
from . import subspaces
from .inspection import inspect_model
from .subspaces import SEED, ProbeResult

REFERENCE_QUANTILE, STATIC_SHARE = 0.9, 0.05
"""A feature is static if its range is below this share of this quantile of all ranges. Not of the maximum: learned
tables have a few extreme features."""
NEGLIGIBLE = 1e-9
"""Position variance below this share of the token variance is rounding error."""


@dataclasses.dataclass(frozen=True)
class PositionEmbeddings:
    """One vector per position, before it is mixed with token embeddings, and how much each feature varies."""

    name: str
    table: torch.Tensor
    """(positions, features)."""

    @property
    def ranges(self) -> torch.Tensor:
        """(features,): maximum minus minimum over positions."""
        return (self.table.amax(0) - self.table.amin(0)).double()

    @property
    def reference_range(self) -> float:
        """The range that the most variable tenth of the features reaches."""
        return self.ranges.quantile(REFERENCE_QUANTILE).item()

    @property
    def static(self) -> torch.Tensor:
        """(features,): True for features that hardly vary, by less than 5% of the reference range."""
        return self.ranges < STATIC_SHARE * self.reference_range

    def __str__(self) -> str:
        (positions, features), static = self.table.shape, self.static
        return (
            f"{self.name}: {positions} positions x {features} features, values from {self.table.min():.3g} to "
            f"{self.table.max():.3g}, mean norm {self.table.norm(dim=-1).mean():.3g}; {int(static.sum())} features are "
            f"static, {static[features // 2 :].float().mean():.0%} of the upper half"
        )


def position_embeddings(model: nn.Module, length: int = 128) -> PositionEmbeddings:
    """Read the position embeddings of a model; if several schemes have some, those of the first.

    Args:
        model: A stock or converted model, with or without a head.
        length: Number of positions.

    Returns:
        The table of position embeddings, and how much each feature varies.

    Raises:
        PosEncError: If the model has no position embeddings, or fewer than `length`.

    Example:
        >>> position_embeddings(build_model("sinusoidal"), 128).table.shape
        torch.Size([128, 64])
    """
    with inspect_model(model, length) as inspector:
        tables = inspector.position_vectors()
    if not tables:
        raise PosEncError(
            f"{inspector.name} has no position embeddings; try bias_by_distance, relative_buckets or rotary_decay"
        )
    return PositionEmbeddings(inspector.name, tables[0])


@dataclasses.dataclass(frozen=True)
class TokenClusters:
    """The input embeddings of some tokens, each at every position: one cluster per token."""

    name: str
    tokens: tuple[int, ...]
    labels: tuple[str, ...]
    spread: torch.Tensor
    """(T,): root mean square distance of a token's embeddings from their centroid."""
    nearest_distance: torch.Tensor
    """(T,): distance from a token's centroid to the nearest other one."""
    accuracy: float
    """Share of embeddings whose nearest centroid is that of their own token."""
    projection: torch.Tensor
    """(T, N, 2): the first two principal components."""
    explained_variance: float
    """Share of the variance that the projection shows."""

    @property
    def relative_spread(self) -> float:
        """Mean of spread / nearest_distance; below 1, clusters are separate."""
        return (self.spread / self.nearest_distance.clamp(min=1e-30)).mean().item()

    def __str__(self) -> str:
        return (
            f"{self.name}: {len(self.tokens)} tokens at {self.projection.shape[1]} positions; spread within a token "
            f"{self.spread.mean():.3g}, distance to the nearest other token {self.nearest_distance.mean():.3g} (mean "
            f"ratio {self.relative_spread:.2f}); {self.accuracy:.1%} are closest to their own token"
        )


def token_clusters(
    model: nn.Module, tokens: Sequence[int] | int = 128, *, length: int = 64, labels: Sequence[str] | None = None
) -> TokenClusters:
    """Compare how far positions spread a token's embedding with the distance between tokens.

    Args:
        model: A stock or converted model, with or without a head.
        tokens: Token ids, or how many to draw at random.
        length: Number of positions.
        labels: Names of the tokens for plots.

    Returns:
        Spread, distances and a two-dimensional projection.

    Raises:
        PosEncError: If there are fewer than two tokens, unknown ones, or a wrong number of labels.
    """
    with inspect_model(model, length) as inspector:
        vocab_size = len(inspector.token_vectors)
        if isinstance(tokens, int):
            tokens = torch.randperm(vocab_size, generator=torch.Generator().manual_seed(SEED))[:tokens].tolist()
        if len(tokens) < 2 or min(tokens) < 0 or max(tokens) >= vocab_size:
            raise PosEncError(f"tokens must be at least 2 ids from 0 to {vocab_size - 1}")
        labels = [f"token {token}" for token in tokens] if labels is None else labels
        if len(labels) != len(tokens):
            raise PosEncError(f"got {len(labels)} labels for {len(tokens)} tokens")
        embeddings_TNE = inspector.input_embeddings(torch.tensor(tokens)[:, None].repeat(1, length)).double()
    centroids_TE, points = embeddings_TNE.mean(1), embeddings_TNE.flatten(0, 1)
    assigned_TN = torch.cdist(points, centroids_TE).argmin(-1).view(len(tokens), length)
    directions, variances = subspaces.principal_components(points)
    projection = (points - points.mean(0)) @ directions[:, :2]
    return TokenClusters(
        name=inspector.name,
        tokens=tuple(tokens),
        labels=tuple(labels),
        spread=(embeddings_TNE - centroids_TE[:, None]).square().sum(-1).mean(-1).sqrt(),
        nearest_distance=torch.cdist(centroids_TE, centroids_TE).fill_diagonal_(torch.inf).amin(-1),
        accuracy=(assigned_TN == torch.arange(len(tokens))[:, None]).double().mean().item(),
        projection=projection.view(len(tokens), length, 2),
        explained_variance=(variances[:2].sum() / variances.sum().clamp(min=1e-300)).item(),
    )


@dataclasses.dataclass(frozen=True)
class Separability:
    """Linear probes and subspaces of tokens and positions in the input embeddings."""

    name: str
    mix: str
    """How tokens and positions are combined: "add", "concat", "attention" or "none"; "unmixed" for the baseline."""
    width: int
    """Size of the vectors that the probes see."""
    position_probe: ProbeResult
    """Trained on some tokens and tested on others: reads the position whatever the token."""
    token_probe: ProbeResult
    """Trained at some positions and tested at others: reads the token whatever the position."""
    token_dimension: float
    """Effective dimension (participation ratio) of the tokens, averaged over positions."""
    position_dimension: float
    mixed_dimension: float
    angles: torch.Tensor
    """(k,): principal angles, in degrees, between the leading directions of tokens and of positions."""
    random_angles: torch.Tensor
    """(k,): the same between random subspaces of these dimensions."""

    def __str__(self) -> str:
        smallest = [f"{angles[0]:.0f}" if len(angles) else "none" for angles in (self.angles, self.random_angles)]
        position, token = self.position_probe, self.token_probe
        return (
            f"{self.name}, {self.mix} (width {self.width}): position probe {position.accuracy:.1%} on unseen tokens, "
            f"mean error {position.error:.1f} (chance {position.chance:.1%}); token probe {token.accuracy:.1%} at "
            f"unseen positions (chance {token.chance:.1%}); effective dimensions: tokens {self.token_dimension:.1f}, "
            f"positions {self.position_dimension:.1f}, mixed {self.mixed_dimension:.1f}; smallest principal angle "
            f"{smallest[0]} degrees (random: {smallest[1]})"
        )


def separability(
    model: nn.Module, *, length: int = 64, num_tokens: int = 128, rows: int = 256, unmixed: bool = False
) -> Separability:
    """Measure how well linear probes read token and position off the input embeddings.

    With fewer tokens in the vocabulary than about four times the width, the position probe overfits.

    Args:
        model: A stock or converted model, with or without a head.
        length: Number of positions, at least 4.
        num_tokens: Number of classes of the token probe, at least 4.
        rows: Sequences of random tokens to embed.
        unmixed: Probe the concatenation of token and position vectors instead, as an upper bound.

    Returns:
        Probe accuracies, effective dimensions and principal angles.

    Raises:
        PosEncError: If there are too few tokens or positions.

    Example:
        >>> print(separability(build_model("sinusoidal")))
    """
    with inspect_model(model, length) as inspector:
        vocab_size, mix = len(inspector.token_vectors), "unmixed" if unmixed else inspector.mix
        num_tokens = min(num_tokens, vocab_size)
        if num_tokens < 4 or length < 4:
            raise PosEncError(f"at least 4 tokens and 4 positions are needed, got {num_tokens} and {length}")
        generator = torch.Generator().manual_seed(SEED)
        ids_BN = torch.randint(vocab_size, (rows, length), generator=generator)
        classes_T = torch.randperm(vocab_size, generator=generator)[:num_tokens]
        labels_BN = torch.randint(num_tokens, (rows, length), generator=generator)
        train_tokens = torch.rand(vocab_size, generator=generator) < 0.5
        train_BN = (torch.randperm(length, generator=generator) % 2 == 0).expand(rows, -1)
        embed = inspector.unmixed_embeddings if unmixed else inspector.input_embeddings
        mixed_BNE, positions_BN = embed(ids_BN), torch.arange(length).expand(rows, -1)
        position_probe = subspaces.linear_probe(mixed_BNE, positions_BN, train_tokens[ids_BN], length)
        token_probe = subspaces.linear_probe(embed(classes_T[labels_BN]), labels_BN, train_BN, num_tokens)
        grid_TNE = embed(classes_T[:, None].repeat(1, length))
    # Averaging over the other factor isolates each one; for a sum these are the two summands, up to a constant.
    tokens_TE, positions_NE = grid_TNE.mean(1), grid_TNE.mean(0)
    if positions_NE.var(0).sum() < NEGLIGIBLE * tokens_TE.var(0).sum():
        positions_NE = torch.zeros_like(positions_NE)
    angles, random_angles = subspaces.compare_subspaces(tokens_TE, positions_NE)
    return Separability(
        name=inspector.name,
        mix=mix,
        width=mixed_BNE.shape[-1],
        position_probe=position_probe,
        token_probe=token_probe,
        token_dimension=subspaces.effective_dimension(tokens_TE),
        position_dimension=subspaces.effective_dimension(positions_NE),
        mixed_dimension=subspaces.effective_dimension(mixed_BNE.flatten(0, 1)),
        angles=angles,
        random_angles=random_angles,
    )
