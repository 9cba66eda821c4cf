"""Linear probes and subspaces, on data with known answers."""

from __future__ import annotations

import math

import pytest
import torch

from hf_posenc import PosEncError
from hf_posenc.analysis import subspaces


def test_probes_find_what_is_there_and_nothing_else() -> None:
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(8, (4000,), generator=generator)
    is_train = torch.arange(4000) % 2 == 0
    noise = torch.randn(4000, 20, generator=generator)
    signal = torch.outer(labels.double(), torch.randn(20, generator=generator).double())
    readable = subspaces.linear_probe(signal + 0.01 * noise, labels, is_train, num_classes=8)
    assert readable.accuracy > 0.99  # classes are on a line: those in the middle must be found as well
    assert readable.control < 0.25
    unreadable = subspaces.linear_probe(noise, labels, is_train, num_classes=8)
    assert abs(unreadable.accuracy - unreadable.chance) < 0.03
    with pytest.raises(PosEncError, match="test samples"):
        subspaces.linear_probe(noise, labels, torch.ones(4000, dtype=torch.bool), num_classes=8)


def test_principal_angles_of_known_subspaces() -> None:
    eye = torch.eye(5, dtype=torch.float64)
    tilted = math.cos(0.3) * eye[:, 1] + math.sin(0.3) * eye[:, 3]
    angles = subspaces.principal_angles(eye[:, :2], torch.stack([eye[:, 0], tilted, eye[:, 4]], dim=1))
    torch.testing.assert_close(angles, torch.tensor([0.0, math.degrees(0.3)]).double(), rtol=0, atol=1e-6)
    orthogonal = subspaces.principal_angles(eye[:, :2], eye[:, 2:4])
    torch.testing.assert_close(orthogonal, torch.full((2,), 90.0).double())
    tiny = torch.stack([eye[:, 0] * math.cos(1e-9) + eye[:, 1] * math.sin(1e-9)], dim=1)
    assert subspaces.principal_angles(eye[:, :1], tiny).item() == pytest.approx(math.degrees(1e-9), rel=1e-4)


def test_random_subspaces_of_many_dimensions_are_nearly_orthogonal() -> None:
    line = torch.zeros(3, 400)
    line[:, 0] = torch.arange(3)
    angles, random_angles = subspaces.compare_subspaces(line, line)
    assert angles.max() < 1e-5
    assert random_angles.min() > 75


def test_effective_dimension_and_leading_directions() -> None:
    corners = torch.eye(6)[:4].repeat(3, 1)
    assert subspaces.effective_dimension(corners) == pytest.approx(3)
    assert subspaces.leading_directions(corners, 0.99).shape == (6, 3)
    assert subspaces.effective_dimension(torch.ones(4, 3)) == 0
    assert subspaces.leading_directions(torch.ones(4, 3)).shape == (3, 0)


def test_principal_components_match_svd() -> None:
    vectors = torch.randn(50, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    directions, variances = subspaces.principal_components(vectors)
    _, singular_values, expected = torch.linalg.svd(vectors - vectors.mean(0), full_matrices=False)
    torch.testing.assert_close(variances, singular_values.square())
    torch.testing.assert_close((directions.T @ expected.T).abs(), torch.eye(7, dtype=torch.float64))
