"""The colours of all figures, as eyes see them that lack one kind of cone: simulated, and measured in CIE Lab."""

from __future__ import annotations

from itertools import combinations, pairwise
from typing import Any

import pytest
import torch
from matplotlib import colormaps
from matplotlib.colors import to_rgb

from hf_posenc.plots import style

# Machado, Oliveira and Fernandes 2009, severity 1: linear RGB as seen without red, green or blue cones.
EYES = {
    "all cones": ((1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0)),
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
APART = 15.0
"""Lab distance of colours that are told apart side by side; red and green of matplotlib's own cycle have 7."""
LEVELS, FAR = 33, 8
"""Colours of a map that are looked at; a quarter of it is far."""


def seen(colours: Any, eyes: str) -> torch.Tensor:
    """(n, 3) in Lab, of (n, 3) in sRGB."""
    rgb = torch.tensor(colours, dtype=torch.float64)
    linear = torch.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    matrix = torch.tensor(TO_XYZ, dtype=torch.float64) / torch.tensor(WHITE, dtype=torch.float64)[:, None]
    xyz = (linear @ torch.tensor(EYES[eyes], dtype=torch.float64).T).clamp(0, 1) @ matrix.T
    root = torch.where(xyz > (6 / 29) ** 3, xyz.clamp(min=1e-12) ** (1 / 3), xyz / (3 * (6 / 29) ** 2) + 4 / 29)
    x, y, z = root.T
    return torch.stack([116 * y - 16, 500 * (x - y), 200 * (y - z)], dim=-1)


def nearest(colours: Any, eyes: str) -> float:
    return min((one - other).norm().item() for one, other in combinations(seen(colours, eyes), 2))


def nearest_far(name: str, eyes: str) -> float:
    """The smallest distance of any two levels of a map that are a quarter of it apart."""
    found = seen([colormaps[name](level / (LEVELS - 1))[:3] for level in range(LEVELS)], eyes)
    return min((found[a] - found[b]).norm().item() for a, b in combinations(range(LEVELS), 2) if b - a >= FAR)


@pytest.mark.parametrize("eyes", EYES)
def test_everyone_tells_the_colours_apart(eyes: str) -> None:
    assert nearest([to_rgb(colour) for colour in style.COLORS], eyes) > APART
    for name in (style.SEQUENTIAL_CMAP, style.INDEX_CMAP, style.DIVERGING_CMAP):
        assert nearest_far(name, eyes) > APART
    for name in (style.SEQUENTIAL_CMAP, style.INDEX_CMAP):  # more is lighter, for every eye and in grey
        ramp = seen([colormaps[name](level / (LEVELS - 1))[:3] for level in range(LEVELS)], eyes)
        assert bool((ramp[1:, 0] > ramp[:-1, 0]).all())


def test_the_check_above_can_fail() -> None:
    assert nearest([to_rgb("tab:red"), to_rgb("tab:green")], "deuteranopia") < APART
    assert nearest([to_rgb("tab:red"), to_rgb("tab:green")], "all cones") > APART
    assert nearest_far("RdYlGn", "protanopia") < 5
    white, black = seen([(1.0, 1.0, 1.0), (0.0, 0.0, 0.0)], "all cones")
    assert white.tolist() == pytest.approx([100.0, 0.0, 0.0], abs=0.02)  # the matrix is rounded
    assert torch.allclose(black, torch.zeros(3, dtype=torch.float64), atol=1e-6)


def test_neighbouring_lines_differ_in_more_than_colour() -> None:
    looks = [style.line_style(number) for number in range(32)]
    assert len({tuple(look.values()) for look in looks}) == 32
    assert all(one["linestyle"] != other["linestyle"] for one, other in pairwise(looks[:8]))
