"""Colors stay distinguishable with simulated color vision deficiencies, measured in CIE Lab."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, pairwise

import pytest
import torch
from matplotlib import colormaps
from matplotlib.colors import to_rgb

from hf_posenc.plots import style

# Machado, Oliveira and Fernandes 2009, severity 1: linear RGB without red, green or blue cones.
COLOR_VISION = {
    "normal": ((1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0)),
    "protanopia": (
        (0.152286, 1.052583, -0.204868),
        (0.114503, 0.786281, 0.099216),
        (-0.003882, -0.048116, 1.051998),
    ),
    "deuteranopia": (
        (0.367322, 0.860646, -0.227968),
        (0.280085, 0.672501, 0.047413),
        (-0.011820, 0.042940, 0.968881),
    ),
    "tritanopia": (
        (1.255528, -0.076749, -0.178779),
        (-0.078411, 0.930809, 0.147602),
        (0.004733, 0.691367, 0.303900),
    ),
}
TO_XYZ = ((0.4124564, 0.3575761, 0.1804375), (0.2126729, 0.7151522, 0.0721750), (0.0193339, 0.1191920, 0.9503041))
WHITE = (0.95047, 1.0, 1.08883)
MIN_DISTANCE = 15.0
"""Lab distance of colors that are easy to tell apart; matplotlib's default red and green have 7 for deuteranopes."""
CMAP_SAMPLES, MIN_STEP = 33, 8
"""Samples of a colormap to compare, if they are at least a quarter of it apart."""


def to_lab(colors: Sequence[Sequence[float]], vision: str) -> torch.Tensor:
    """(n, 3) Lab coordinates of (n, 3) sRGB colors as perceived."""
    rgb = torch.tensor(colors, dtype=torch.float64)
    linear = torch.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    matrix = torch.tensor(TO_XYZ, dtype=torch.float64) / torch.tensor(WHITE, dtype=torch.float64)[:, None]
    xyz = (linear @ torch.tensor(COLOR_VISION[vision], dtype=torch.float64).T).clamp(0, 1) @ matrix.T
    root = torch.where(xyz > (6 / 29) ** 3, xyz.clamp(min=1e-12) ** (1 / 3), xyz / (3 * (6 / 29) ** 2) + 4 / 29)
    x, y, z = root.T
    return torch.stack([116 * y - 16, 500 * (x - y), 200 * (y - z)], dim=-1)


def min_distance(colors: Sequence[Sequence[float]], vision: str) -> float:
    return min((first - second).norm().item() for first, second in combinations(to_lab(colors, vision), 2))


def min_cmap_distance(name: str, vision: str) -> float:
    """The smallest distance of two colors that are a quarter of the colormap apart."""
    samples = to_lab([colormaps[name](level / (CMAP_SAMPLES - 1))[:3] for level in range(CMAP_SAMPLES)], vision)
    return min(
        (samples[a] - samples[b]).norm().item() for a, b in combinations(range(CMAP_SAMPLES), 2) if b - a >= MIN_STEP
    )


@pytest.mark.parametrize("vision", COLOR_VISION)
def test_colors_are_distinguishable(vision: str) -> None:
    assert min_distance([to_rgb(color) for color in style.COLORS], vision) > MIN_DISTANCE
    for name in (style.SEQUENTIAL_CMAP, style.INDEX_CMAP, style.DIVERGING_CMAP):
        assert min_cmap_distance(name, vision) > MIN_DISTANCE
    for name in (style.SEQUENTIAL_CMAP, style.INDEX_CMAP):  # higher is lighter, also in grayscale
        ramp = to_lab([colormaps[name](level / (CMAP_SAMPLES - 1))[:3] for level in range(CMAP_SAMPLES)], vision)
        assert bool((ramp[1:, 0] > ramp[:-1, 0]).all())


def test_indistinguishable_colors_are_detected() -> None:
    assert min_distance([to_rgb("tab:red"), to_rgb("tab:green")], "deuteranopia") < MIN_DISTANCE
    assert min_distance([to_rgb("tab:red"), to_rgb("tab:green")], "normal") > MIN_DISTANCE
    assert min_cmap_distance("RdYlGn", "protanopia") < 5
    white, black = to_lab([(1.0, 1.0, 1.0), (0.0, 0.0, 0.0)], "normal")
    assert white.tolist() == pytest.approx([100.0, 0.0, 0.0], abs=0.02)  # the matrix is rounded
    assert torch.allclose(black, torch.zeros(3, dtype=torch.float64), atol=1e-6)


def test_neighboring_lines_differ_in_dashes() -> None:
    styles = [style.line_style(number) for number in range(32)]
    assert len({tuple(line.values()) for line in styles}) == 32
    assert all(first["linestyle"] != second["linestyle"] for first, second in pairwise(styles[:8]))
