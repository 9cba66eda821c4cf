"""Dimensions and angles: how many directions a cloud of vectors fills, and how two of them lie to each other."""

from __future__ import annotations

import torch

SHARE = 0.9
"""Of the variance, that the directions of a cloud are to hold."""


def participation(variances: torch.Tensor) -> float:
    """How many of some variances count: their sum squared, over the sum of their squares. 0 if all are zero."""
    total = variances.sum()
    return (total.square() / variances.square().sum()).item() if total > 0 else 0.0


def effective_dimension(vectors: torch.Tensor) -> float:
    """The participation ratio of the variances along the principal directions of (any number, features)."""
    return participation(torch.linalg.svdvals(_centred(vectors)).square())


def leading_directions(vectors: torch.Tensor, share: float = SHARE) -> torch.Tensor:
    """(features, k): the orthonormal principal directions that together hold a share of the variance."""
    _, sizes, directions = torch.linalg.svd(_centred(vectors), full_matrices=False)
    variances = sizes.square()
    if not variances.sum() > 0:
        raise ValueError("all vectors are the same: there is no direction in which they differ")
    held = variances.cumsum(0) / variances.sum()
    count = min(int((held < share - 1e-12).sum()) + 1, len(held))
    return directions[:count].T


def principal_angles(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """In degrees, smallest first, between two subspaces, each of orthonormal columns: (features, k)."""
    first, second = first.double(), second.double()
    smaller, larger = (first, second) if first.shape[1] <= second.shape[1] else (second, first)
    cosines = torch.linalg.svdvals(larger.T @ smaller).clamp(max=1.0)
    # A cosine near one says little of a small angle: there the sine does, of what lies outside of the other subspace.
    sines = torch.linalg.svdvals(smaller - larger @ (larger.T @ smaller)).clamp(max=1.0).flip(0)
    return torch.rad2deg(torch.atan2(sines[: len(cosines)], cosines))


def random_angles(features: int, first: int, second: int, seed: int = 0) -> torch.Tensor:
    """The same between two subspaces of these dimensions that have nothing to do with each other."""
    generator = torch.Generator().manual_seed(seed)
    drawn = (torch.randn(features, count, generator=generator, dtype=torch.float64) for count in (first, second))
    one, other = (torch.linalg.qr(vectors).Q for vectors in drawn)
    return principal_angles(one, other)


def projected_to_plane(vectors: torch.Tensor) -> tuple[torch.Tensor, float]:
    """(any number, 2) along the two directions in which vectors differ most, and the share of the variance there."""
    centred = _centred(vectors)
    _, sizes, directions = torch.linalg.svd(centred, full_matrices=False)
    variances = sizes.square()
    plane = centred @ directions[:2].T
    if plane.shape[1] < 2:
        plane = torch.nn.functional.pad(plane, (0, 2 - plane.shape[1]))
    return plane, (variances[:2].sum() / variances.sum().clamp(min=1e-300)).item()


def _centred(vectors: torch.Tensor) -> torch.Tensor:
    vectors = vectors.double()
    return vectors - vectors.mean(0)
