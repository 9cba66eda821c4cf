"""Linear probes: what can be read off vectors by one matrix, fitted in closed form and tried on others."""

from __future__ import annotations

import dataclasses

import torch

RIDGE = 1e-4
"""Added to the covariance, as a share of its mean diagonal: enough to invert it, too little to matter."""


@dataclasses.dataclass(frozen=True)
class Probe:
    """How often the right class came out highest, on vectors that the probe was not fitted to."""

    accuracy: float
    chance: float
    """Of guessing among all classes."""
    control: float
    """The accuracy of the same probe fitted to labels in random order: if this is above chance, the trial is flawed."""
    error: float
    """Mean distance between the class found and the right one: it means something where classes are in an order."""


def linear_probe(
    vectors: torch.Tensor, labels: torch.Tensor, fitted: torch.Tensor, *, classes: int, seed: int = 0
) -> Probe:
    """Fit a matrix from vectors, (S, E), to classes on the samples marked in `fitted`, and try it on the rest.

    The matrix is that of a linear discriminant: least squares measured by the spread within classes. Least squares onto
    ones and zeros would never choose a class that lies in line between two others, as positions do.
    """
    if fitted.all() or not fitted.any():
        raise ValueError("a probe needs samples to be fitted to, and others to be tried on")
    vectors = vectors.double()
    vectors = vectors - vectors[fitted].mean(0)
    right, told = labels[~fitted], labels[fitted]
    shuffled = told[torch.randperm(len(told), generator=torch.Generator().manual_seed(seed))]
    found, by_chance = (_classified(vectors[fitted], given, vectors[~fitted], classes) for given in (told, shuffled))
    return Probe(
        accuracy=(found == right).double().mean().item(),
        chance=1 / classes,
        control=(by_chance == right).double().mean().item(),
        error=(found - right).abs().double().mean().item(),
    )


def _classified(known: torch.Tensor, labels: torch.Tensor, unknown: torch.Tensor, classes: int) -> torch.Tensor:
    counts = torch.bincount(labels, minlength=classes).double()
    centres = known.new_zeros(classes, known.shape[1]).index_add_(0, labels, known)
    centres = centres / counts.clamp(min=1)[:, None]
    within = known - centres[labels]
    covariance = within.T @ within / len(known)
    ridge = RIDGE * known.square().mean().clamp(min=1e-30)
    weight = torch.linalg.solve(covariance + ridge * torch.eye(len(covariance), dtype=known.dtype), centres.T)
    heights = -(centres * weight.T).sum(-1) / 2
    heights[counts == 0] = -torch.inf  # nobody has told of these
    return (unknown @ weight + heights).argmax(-1)
