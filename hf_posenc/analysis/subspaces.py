"""Linear probes and subspaces: what one matrix can read off vectors, and which directions they span."""

from __future__ import annotations

import dataclasses

import torch

from ..errors import PosEncError

SEED = 0
RIDGE = 1e-4
"""Regularization of the probe's covariance, relative to the mean square of the features."""


@dataclasses.dataclass(frozen=True)
class ProbeResult:
    """Accuracy of a linear probe on held-out vectors."""

    accuracy: float
    chance: float
    control: float
    """Accuracy of the same probe trained on shuffled labels; above chance, the setup is flawed."""
    error: float
    """Mean absolute difference of predicted and true class, meaningful if classes are ordered."""


def linear_probe(vectors: torch.Tensor, labels: torch.Tensor, is_train: torch.Tensor, num_classes: int) -> ProbeResult:
    """Train a probe on the vectors (..., features) marked in `is_train` (...) and test it on the others.

    Linear discriminant analysis rather than regression onto one-hot labels: regression never predicts a class that
    lies on a line between two others, as positions do.
    """
    if is_train.all() or not is_train.any():
        raise PosEncError("a probe needs both training and test samples")
    train, test, train_labels, true = vectors[is_train], vectors[~is_train], labels[is_train], labels[~is_train]
    shuffled = train_labels[torch.randperm(len(train_labels), generator=torch.Generator().manual_seed(SEED))]
    predicted, control = (_discriminant(train, given, test, num_classes) for given in (train_labels, shuffled))
    return ProbeResult(
        accuracy=(predicted == true).double().mean().item(),
        chance=1 / num_classes,
        control=(control == true).double().mean().item(),
        error=(predicted - true).abs().double().mean().item(),
    )


def _discriminant(train: torch.Tensor, labels: torch.Tensor, test: torch.Tensor, num_classes: int) -> torch.Tensor:
    """The classes that linear discriminant analysis predicts for `test`."""
    mean = train.double().mean(0)
    train, test = train.double() - mean, test.double() - mean
    counts = torch.bincount(labels, minlength=num_classes)
    centroids = train.new_zeros(num_classes, train.shape[1]).index_add_(0, labels, train)
    centroids /= counts.clamp(min=1)[:, None]
    residuals = train - centroids[labels]
    covariance = residuals.T @ residuals / len(train)
    covariance.diagonal().add_(RIDGE * train.square().mean().clamp(min=1e-30))
    weight = torch.linalg.solve(covariance, centroids.T)
    intercept = -(centroids * weight.T).sum(-1) / 2
    intercept[counts == 0] = -torch.inf  # classes without training samples are never predicted
    return (test @ weight + intercept).argmax(-1)


def principal_components(vectors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(features, k) orthonormal principal directions of (samples, features), and (k,) variances, largest first."""
    centered = vectors.double() - vectors.double().mean(0)
    variances, directions = torch.linalg.eigh(centered.T @ centered)
    return directions.flip(-1), variances.flip(-1).clamp(min=0)


def effective_dimension(vectors: torch.Tensor) -> float:
    """The participation ratio (sum v)^2 / sum v^2 of the variances along principal directions; 0 for equal vectors."""
    _, variances = principal_components(vectors)
    return (variances.sum().square() / variances.square().sum().clamp(min=1e-300)).item()


def leading_directions(vectors: torch.Tensor, explained: float = 0.9) -> torch.Tensor:
    """(features, k): the fewest principal directions that explain a share of the variance; none for equal vectors."""
    directions, variances = principal_components(vectors)
    cumulative = variances.cumsum(0) / variances.sum()
    return directions[:, : int((cumulative < explained - 1e-12).sum()) + 1 if variances.any() else 0]


def principal_angles(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """(k,): angles in degrees, smallest first, between two subspaces given by orthonormal columns."""
    small, large = sorted((first.double(), second.double()), key=lambda basis: basis.shape[1])
    overlap = large.T @ small
    cosines = torch.linalg.svdvals(overlap).clamp(max=1.0)
    # The cosine of a small angle is too close to 1 to be accurate; the sine, of the residual, is not.
    sines = torch.linalg.svdvals(small - large @ overlap).clamp(max=1.0).flip(0)
    return torch.rad2deg(torch.atan2(sines[: len(cosines)], cosines))


def compare_subspaces(first: torch.Tensor, second: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Principal angles between the leading directions of two sets of vectors, and of random subspaces like them."""
    bases = [leading_directions(vectors) for vectors in (first, second)]
    generator = torch.Generator().manual_seed(SEED)
    samples = [torch.randn(basis.shape, generator=generator, dtype=torch.float64) for basis in bases]
    return principal_angles(*bases), principal_angles(*(torch.linalg.qr(sample).Q for sample in samples))
