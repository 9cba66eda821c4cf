"""Rotary positions whose logits also decay with distance, the faster the shorter the wavelength."""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

import torch

from .base import Kind, ModelShape, Scheme
from .functional import Angles, expand_pairs, rotate_pairs, rotation_angles
from .inputs import Positions, is_tracing
from .options import Options, option, positive

THETA, GAMMA, LAYOUT = 10000.0, 0.4, "halves"
LARGEST_EXPONENT = {torch.float16: 10.0}
"""Beyond this, e to it leaves the dtype; 80 for those with the range of float32."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class XposOptions(Options):
    scale_base: float = option(512.0, "positions over which the shortest wavelength decays to 0.29", positive)


class Prepared(NamedTuple):
    angles: Angles
    exponents: torch.Tensor
    farthest: int | None
    """Of all positions from the centre; None where it is not known."""


class Xpos(Scheme):
    """Rotary positions with a decay: queries shrink and keys grow with their position, so that far logits fade."""

    name = "xpos"
    paper = "Sun et al. 2023, https://arxiv.org/abs/2212.10554"
    kind = Kind.ROTATION
    formula = (
        "rope, with q_i times zeta^((i - c) / scale_base) and k_j divided by the same at j, zeta = (2k + 0.4 d) / 1.4 d"
    )
    cost = "no parameters; as rope"
    neutral = "no parameters"
    extends = True
    Options = XposOptions
    options: XposOptions

    def __init__(self, options: XposOptions, shape: ModelShape) -> None:
        super().__init__(options, shape)
        if shape.head_size % 2:
            raise ValueError(f"xpos turns features in pairs: the head size {shape.head_size} is odd")
        # A fixed centre, so that keys in a cache stay valid; in the middle, so that factors stay near one.
        self.centre = shape.max_positions // 2

    def prepare(self, positions: Positions) -> Prepared:
        size, device = self.shape.head_size, positions.queries_BQ.device
        places = torch.arange(0, size, 2, device=device, dtype=torch.float)
        turning = positions.queries_BQ.unsqueeze(-1).float() / THETA ** (places / size)
        zeta = (places + GAMMA * size) / ((1 + GAMMA) * size)
        decay = (positions.queries_BQ - self.centre).unsqueeze(-1).float() / self.options.scale_base * zeta.log()
        angles, exponents = rotation_angles(turning.unsqueeze(1), LAYOUT), expand_pairs(decay, LAYOUT).unsqueeze(1)
        length = positions.length_bound if positions.length_bound is not None or is_tracing() else positions.length()
        farthest = None if length is None else max(length - self.centre, self.centre)
        return Prepared(angles, exponents, farthest)

    def rotate(self, states_BHQD: torch.Tensor, prepared: Prepared, keys: bool) -> torch.Tensor:
        self._refuse_overflow(states_BHQD.dtype, prepared.farthest)
        factors = (-prepared.exponents if keys else prepared.exponents).exp()
        return rotate_pairs(states_BHQD, prepared.angles.cosines * factors, prepared.angles.turning * factors, LAYOUT)

    def _refuse_overflow(self, dtype: torch.dtype, farthest: int | None) -> None:
        largest = LARGEST_EXPONENT.get(dtype, 80.0)
        steepest = -math.log(GAMMA / (1 + GAMMA)) / self.options.scale_base
        if farthest is not None and farthest * steepest > largest:
            raise ValueError(
                f"xpos: at {farthest} positions from its centre the decay leaves {dtype}: raise scale_base "
                f"above {math.ceil(farthest * steepest * self.options.scale_base / largest)}, use bfloat16 rather than "
                "float16, or cut the input"
            )
